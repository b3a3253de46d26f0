# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# Bounds checks are off because indexes stay below `count`; lengths and counts from outside are checked in the `def`s.
"""Ready queues: packed QUEUED jobs in claim order, with a bound; the plain-Python twin is `wheelsched/fairness/ready_pure.py`.

A binary heap of records by value. Timers fire in ascending order, and an ascending push does not move up, so pushing costs
a copy and one comparison.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

from record cimport TIMER_BYTES, Timer, before


cdef extern from * nogil:
    """
    #define ready_highest_bit(word) (63 - __builtin_clzll(word))
    """
    int highest_bit "ready_highest_bit"(uint64_t word)

cdef enum:
    RANGE_BITS = 11
    FEW = 256
    AT_MS = 0
    ID_LOW = 1

cdef uint64_t SIGN = <uint64_t>1 << 63      # flips signed order into unsigned


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
        if self.count == self.size:
            # Never past the one record that triggers a spill: doubling a full queue there would copy 6 MB for nothing.
            self.resize(min(max(64, 2 * self.size), self.limit + 1))
        self.count += 1
        self.move_up(self.count - 1, timer)
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
        cdef int64_t rank = self.limit - self.limit // 4
        cdef int64_t held = self.count
        cdef int64_t kept = rank
        cdef Timer first_dropped = at_rank(self.heap, held, &rank)
        self.has_mark = True        # a record in memory lies before any mark there was, so this can only lower it
        self.mark_at_ms = first_dropped.at_ms
        self.mark_id_low = first_dropped.id_low
        # A twin of the first dropped record goes too: it would sit at the mark, once here and once in the refill.
        kept -= rank
        self.dropped_count += held - kept
        self.close_gaps(held, kept)

    cdef void close_gaps(self, int64_t held, int64_t kept) noexcept:
        """Make a heap of the `kept` records before the mark among the `held` first.

        What follows a dropped record in its branch is dropped too, so filling the gaps from the front with records from the
        back, each moved up from where it lands, is enough; building a new heap took 8 ms for 262,144 random records.
        """
        cdef int64_t last = held - 1
        cdef int64_t place
        cdef Timer moved
        for place in range(kept):
            if self.before_mark(&self.heap[place]):
                continue
            while not self.before_mark(&self.heap[last]):
                last -= 1
            moved = self.heap[last]
            last -= 1
            self.move_up(place, &moved)
        self.count = kept

    cdef inline void move_up(self, int64_t place, const Timer* timer) noexcept:
        cdef Timer moved = timer[0]
        cdef int64_t parent
        while place:
            parent = (place - 1) >> 1
            if not before(&moved, &self.heap[parent]):
                break
            self.heap[place] = self.heap[parent]
            place = parent
        self.heap[place] = moved


cdef inline bint key_of(const Timer* timer, int field, uint64_t at_key, uint64_t* key) noexcept nogil:
    """The field as an unsigned number; False if the record has no part in the search (id_low: another at_ms)."""
    key[0] = <uint64_t>timer.at_ms ^ SIGN
    if field == AT_MS:
        return True
    if key[0] != at_key:
        return False
    key[0] = timer.id_low
    return True


cdef Timer at_rank(const Timer* timers, int64_t count, int64_t* rank) noexcept nogil:
    """The (at_ms, id_low) at `rank` of the claim order; `rank` becomes how many with the same key come before it. O(count).

    Counts at_ms in 2,048 ranges and looks into the one that holds the rank, until few are left in it; then id_low likewise.
    No comparison decides a branch: exchanging records around a pivot took 6 ms for 262,144 random ones, mostly mispredicted.
    """
    cdef uint32_t[1 << RANGE_BITS] found
    cdef Timer[FEW] few
    cdef Timer result
    cdef uint64_t at_key = 0
    cdef uint64_t low
    cdef uint64_t high
    cdef uint64_t key = 0
    cdef int64_t i
    cdef int field
    cdef int shift
    cdef int place
    cdef int collected = 0
    for field in range(AT_MS, ID_LOW + 1):
        low = ~<uint64_t>0
        high = 0
        for i in range(count):
            if key_of(&timers[i], field, at_key, &key):
                low = min(low, key)
                high = max(high, key)
        while low < high:
            shift = max(0, highest_bit(high - low) + 1 - RANGE_BITS)
            memset(found, 0, sizeof(found))
            for i in range(count):
                if key_of(&timers[i], field, at_key, &key) and low <= key <= high:
                    found[(key - low) >> shift] += 1
            place = 0
            while rank[0] >= found[place]:
                rank[0] -= found[place]
                place += 1
            low += <uint64_t>place << shift
            high = min(high, low + (<uint64_t>1 << shift) - 1)
            if found[place] > FEW:
                continue
            for i in range(count):
                if key_of(&timers[i], field, at_key, &key) and low <= key <= high:
                    few[collected] = timers[i]
                    collected += 1
            return at_rank_of_few(few, collected, rank)
        if field == AT_MS:
            at_key = low
    result.at_ms = <int64_t>(at_key ^ SIGN)
    result.id_low = low
    result.version = result.word = 0
    return result


cdef Timer at_rank_of_few(Timer* timers, int count, int64_t* rank) noexcept nogil:
    """Selection sort up to the rank."""
    cdef Timer swapped
    cdef int wanted = <int>rank[0]
    cdef int first
    cdef int least
    cdef int i
    for first in range(wanted + 1):
        least = first
        for i in range(first + 1, count):
            if before(&timers[i], &timers[least]):
                least = i
        swapped = timers[first]
        timers[first] = timers[least]
        timers[least] = swapped
    rank[0] = 0
    while rank[0] < wanted and same_place(&timers[wanted - 1 - rank[0]], &timers[wanted]):
        rank[0] += 1
    return timers[wanted]


cdef inline bint same_place(const Timer* left, const Timer* right) noexcept nogil:
    return left.at_ms == right.at_ms and left.id_low == right.id_low


cdef Group* group_of(Group* table, uint64_t mask, uint32_t key) noexcept nogil:
    cdef uint64_t place = ((key * <uint64_t>0x9E3779B97F4A7C15) >> 32) & mask
    while table[place].count and table[place].key != key:
        place = (place + 1) & mask
    return &table[place]


def without_partitions(bytes records, int first, int last):
    """The records whose partition, the low 10 bits of `id_low`, is not in [first, last]; their order is kept. O(records)."""
    cdef const char* start = PyBytes_AS_STRING(records)
    cdef int64_t count = PyBytes_GET_SIZE(records) // TIMER_BYTES
    cdef int64_t i
    cdef int64_t kept = 0
    cdef int partition
    cdef Timer timer
    cdef bytes left
    cdef char* place
    if PyBytes_GET_SIZE(records) % TIMER_BYTES:
        raise ValueError(f"{PyBytes_GET_SIZE(records)} bytes of records are not a multiple of {TIMER_BYTES}")
    left = PyBytes_FromStringAndSize(NULL, count * TIMER_BYTES)
    place = PyBytes_AS_STRING(left)
    for i in range(count):
        memcpy(&timer, start + i * TIMER_BYTES, TIMER_BYTES)
        partition = <int>(timer.id_low & 1023)
        if partition < first or partition > last:
            memcpy(place + kept * TIMER_BYTES, &timer, TIMER_BYTES)
            kept += 1
    return left[: kept * TIMER_BYTES]


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
