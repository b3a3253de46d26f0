# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# Bounds checks are off because indexes stay below `count`; lengths and counts from outside are checked in the `def`s.
"""Ready queues: packed QUEUED jobs in claim order, with a bound; the plain-Python twin is `wheelsched/fairness/ready_pure.py`.

A binary heap of records by value. Timers fire in ascending order, and an ascending push does not move up, so pushing costs
a copy and one comparison.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy

from record cimport TIMER_BYTES, Timer, before


cdef struct Group:
    uint32_t key
    int64_t count           # 0: no group here
    char* place             # where its next record goes


cdef class ReadyQueue:
    """The QUEUED jobs of one lane, tenant, queue and priority; holds at most `bound` (>= 4, ValueError below)."""

    cdef Timer* heap
    cdef int64_t count
    cdef int64_t size
    cdef int64_t limit
    cdef int64_t dropped_count
    cdef bint has_mark
    cdef int64_t mark_at_ms
    cdef uint64_t mark_id_low

    def __cinit__(self, int64_t bound):
        if bound < 4:
            raise ValueError(f"bound {bound} is below 4")
        self.limit = bound

    def __dealloc__(self):
        free(self.heap)

    @property
    def bound(self):
        """How many records are held at most."""
        return self.limit

    @property
    def dropped(self):
        """Records dropped so far, by spilling or for lying at or after the mark."""
        return self.dropped_count

    @property
    def reserved_bytes(self):
        """Bytes allocated for records."""
        return self.size * TIMER_BYTES

    @property
    def spilled_from(self):
        """(at_ms, id_low) of the first job that is in the store alone, or None while all of them are here."""
        return (self.mark_at_ms, self.mark_id_low) if self.has_mark else None

    def set_spilled_from(self, mark):
        """Move the mark, after a refill up to it; None: everything is here again."""
        self.has_mark = mark is not None
        if mark is not None:
            self.mark_at_ms, self.mark_id_low = mark

    def __len__(self):
        return self.count

    def head(self):
        """(at_ms, id_low) of the next job, or None. O(1)."""
        return (self.heap[0].at_ms, self.heap[0].id_low) if self.count else None

    cpdef push_batch(self, bytes records):
        """Add packed records. Those at or after `spilled_from` are dropped; past `bound` the latest quarter is.

        ValueError unless the length is a multiple of 24. O(1) a record when ascending, O(log n) otherwise; a spill is
        O(bound) and drops a quarter of it, so it is O(1) a record too.
        """
        cdef const char* place = PyBytes_AS_STRING(records)
        cdef int64_t size = PyBytes_GET_SIZE(records)
        cdef int64_t i
        cdef Timer timer
        if size % TIMER_BYTES:
            raise ValueError(f"{size} bytes of records are not a multiple of {TIMER_BYTES}")
        for i in range(0, size, TIMER_BYTES):
            memcpy(&timer, place + i, TIMER_BYTES)
            if self.has_mark and not self.before_mark(&timer):
                self.dropped_count += 1
                continue
            self.push(&timer)
            if self.count > self.limit:
                self.spill()

    cpdef put_back(self, bytes records):
        """Add records taken earlier and not claimed; the same as `push_batch`."""
        self.push_batch(records)

    cpdef bytes take(self, int64_t n):
        """Remove and return the first min(n, len) jobs in order, packed. ValueError for n < 0. O(n log len)."""
        cdef int64_t count = min(n, self.count)
        cdef bytes records
        cdef Timer* place
        cdef int64_t i
        if n < 0:
            raise ValueError(f"n {n} is below 0")
        records = PyBytes_FromStringAndSize(NULL, count * TIMER_BYTES)
        for i in range(count):
            memcpy(PyBytes_AS_STRING(records) + i * TIMER_BYTES, &self.heap[0], TIMER_BYTES)
            self.count -= 1
            self.sift_down(0, &self.heap[self.count])
        if 4 * self.count < self.size and self.size > 64:
            self.resize(max(64, self.size // 2))
        return records

    cpdef clear(self):
        """Forget all records and the mark; `dropped` keeps counting."""
        free(self.heap)
        self.heap = NULL
        self.count = self.size = 0
        self.has_mark = False

    def check(self):
        """Raise AssertionError unless heap order, bound and mark hold. O(n)."""
        cdef int64_t i
        assert 0 <= self.count <= min(self.size, self.limit) or self.count == 0
        for i in range(self.count):
            assert not before(&self.heap[i], &self.heap[(i - 1) >> 1 if i else 0])
            assert not self.has_mark or self.before_mark(&self.heap[i])

    cdef inline bint before_mark(self, const Timer* timer) noexcept:
        if timer.at_ms != self.mark_at_ms:
            return timer.at_ms < self.mark_at_ms
        return timer.id_low < self.mark_id_low

    cdef int push(self, const Timer* timer) except -1:
        cdef int64_t place = self.count
        cdef int64_t parent
        if self.count == self.size:
            self.resize(max(64, 2 * self.size))
        self.count += 1
        while place:
            parent = (place - 1) >> 1
            if not before(timer, &self.heap[parent]):
                break
            self.heap[place] = self.heap[parent]
            place = parent
        self.heap[place] = timer[0]
        return 0

    cdef void sift_down(self, int64_t place, const Timer* moved) noexcept:
        cdef Timer timer = moved[0]
        cdef int64_t child = 2 * place + 1
        while child < self.count:
            if child + 1 < self.count and before(&self.heap[child + 1], &self.heap[child]):
                child += 1
            if not before(&self.heap[child], &timer):
                break
            self.heap[place] = self.heap[child]
            place = child
            child = 2 * place + 1
        self.heap[place] = timer

    cdef int resize(self, int64_t size) except -1:
        cdef Timer* moved = <Timer*>realloc(self.heap, size * TIMER_BYTES)
        if moved == NULL:
            raise MemoryError(f"no {size * TIMER_BYTES} bytes for ready jobs")
        self.heap = moved
        self.size = size
        return 0

    cdef void spill(self) noexcept:
        """Keep the earliest three quarters of the bound; the mark becomes the first key dropped."""
        cdef int64_t kept = self.limit - self.limit // 4
        cdef int64_t held = self.count
        cdef int64_t i
        select(self.heap, self.count, kept)
        self.has_mark = True        # a record in memory lies before any mark there was, so this can only lower it
        self.mark_at_ms = self.heap[kept].at_ms
        self.mark_id_low = self.heap[kept].id_low
        self.count = 0
        for i in range(kept):
            # A twin of the first dropped record would otherwise sit at the mark, once here and once in the refill.
            if self.before_mark(&self.heap[i]):
                self.heap[self.count] = self.heap[i]
                self.count += 1
        self.dropped_count += held - self.count
        for i in range(self.count // 2 - 1, -1, -1):
            self.sift_down(i, &self.heap[i])


cdef void select(Timer* timers, int64_t count, int64_t rank) noexcept nogil:
    """Reorder so that timers[rank] is in its sorted place, with nothing later in front of it (Hoare 1961, FIND)."""
    cdef int64_t low = 0
    cdef int64_t high = count - 1
    cdef int64_t left
    cdef int64_t right
    cdef uint64_t state = 0x9E3779B97F4A7C15
    cdef Timer pivot
    cdef Timer swapped
    while low < high:
        # The pivot's place is pseudo-random (Knuth's MMIX generator): a heap has enough order to lead fixed choices astray.
        state = state * <uint64_t>6364136223846793005 + <uint64_t>1442695040888963407
        pivot = timers[low + <int64_t>((state >> 33) % <uint64_t>(high - low + 1))]
        left = low
        right = high
        while left <= right:
            while before(&timers[left], &pivot):
                left += 1
            while before(&pivot, &timers[right]):
                right -= 1
            if left <= right:
                swapped = timers[left]
                timers[left] = timers[right]
                timers[right] = swapped
                left += 1
                right -= 1
        if rank <= right:
            high = right
        elif rank >= left:
            low = left
        else:
            return


cdef Group* group_of(Group* table, uint64_t mask, uint32_t key) noexcept nogil:
    cdef uint64_t place = ((key * <uint64_t>0x9E3779B97F4A7C15) >> 32) & mask
    while table[place].count and table[place].key != key:
        place = (place + 1) & mask
    return &table[place]


def split_by_queue(bytes records):
    """Group packed records by `word >> 3` (queue number and priority): [(key, packed records)], sorted by key.

    Order inside a group is kept. ValueError unless the length is a multiple of 24. O(records + groups log groups).
    """
    cdef const char* start = PyBytes_AS_STRING(records)
    cdef int64_t count = PyBytes_GET_SIZE(records) // TIMER_BYTES
    cdef int64_t i
    cdef uint64_t size = 16
    cdef Group* table
    cdef Group* group
    cdef Timer timer
    cdef bytes part
    cdef dict parts = {}
    if PyBytes_GET_SIZE(records) % TIMER_BYTES:
        raise ValueError(f"{PyBytes_GET_SIZE(records)} bytes of records are not a multiple of {TIMER_BYTES}")
    while size < <uint64_t>(2 * count):
        size *= 2
    table = <Group*>calloc(size, sizeof(Group))
    if table == NULL:
        raise MemoryError(f"no memory to split {count} records")
    try:
        for i in range(count):
            memcpy(&timer, start + i * TIMER_BYTES, TIMER_BYTES)
            group = group_of(table, size - 1, timer.word >> 3)
            group.key = timer.word >> 3
            group.count += 1
        for i in range(count):
            memcpy(&timer, start + i * TIMER_BYTES, TIMER_BYTES)
            group = group_of(table, size - 1, timer.word >> 3)
            if group.place == NULL:
                part = PyBytes_FromStringAndSize(NULL, group.count * TIMER_BYTES)
                parts[group.key] = part
                group.place = PyBytes_AS_STRING(part)
            memcpy(group.place, &timer, TIMER_BYTES)
            group.place += TIMER_BYTES
    finally:
        free(table)
    return sorted(parts.items())
