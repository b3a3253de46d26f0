# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
# Bounds checks are off because every index below is masked to its level or bounded by a chunk's own `used`; what comes
# from outside (lengths, times, counts) is checked once, in the `def`s at the boundary.
"""Hierarchical timing wheel over packed 24-byte records; the plain-Python twin is `wheelsched/wheel/pure.py`.

Varghese & Lauck 1987, scheme 7 (hierarchical wheels with overflow lists), laid out as a log: a slot is an append-only list of
1 KiB chunks that hold records by value, so adding is an append, firing is a memcpy, and cascading reads memory in order
instead of chasing one pointer per timer. The level of a timer is the highest bit in which it differs from the wheel's tick.

A cancel appends a tombstone to the slot its timer is in. Within one slot the log order says which came first, and a cascade
moves tombstones along with timers in that order, so a tombstone always arrives behind the timer it is for.

Two variables say where the wheel stands. `hand`: everything up to it has been returned. `tick`: the window the slots are
filed against; never above hand + 1, and nothing in the slots is below it.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memmove, memset

from record cimport TIMER_BYTES, Timer, same_key


cdef extern from "sys/mman.h" nogil:
    void* mmap(void* address, size_t size, int protection, int flags, int file, int64_t offset)
    int munmap(void* address, size_t size)
    int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS
    void* MAP_FAILED

cdef extern from * nogil:
    """
    #define wheel_lowest_bit(word) __builtin_ctzll(word)
    #define wheel_prefetch(address) __builtin_prefetch((address), 1)
    static inline void wheel_prefetch_chunk(const char *chunk) {
        for (int line = 0; line < 1024; line += 64) __builtin_prefetch(chunk + line, 1);
    }
    """
    int wheel_lowest_bit(uint64_t word)
    void wheel_prefetch(const void* address)
    void wheel_prefetch_chunk(const char* chunk)


cdef enum:
    CHUNK_ENTRIES = 42          # 16 + 42 * 24 = 1,024 bytes: 24.4 bytes a timer when full
    SEGMENT_CHUNKS_MIN = 16     # an almost empty wheel maps 16 KiB ...
    SEGMENT_CHUNKS_MAX = 1024   # ... a large one 1 MiB at a time: growth never copies, and an empty segment is unmapped
    LEVELS = 4
    FAR = 4                     # "level" of what lies beyond the top level's turn
    FAR_SHIFT = 40              # 34.8 years
    CASCADE_MAX = 65536         # entries one call may cascade or sift: about 2 ms
    OVERDUE_MAX = 16384         # a heap pop costs up to ten times a slot's memcpy, so its budget is smaller
    COMPACT_NOW_MAX = 32768     # a slot up to here is compacted inside the cancel that asks for it: about 1 ms
    PART_ENTRIES = 8192         # a larger slot is split into parts of about this many
    PARTS_MAX = 32768
    COMPACT_STEP = 64           # entries a cancel contributes to the compaction of a larger slot
    TRIM_MAX = 2                # empty segments a call gives back: each takes about 0.1 ms
    OUTPUT_BYTES_KEPT = 2097152
    LOOKAHEAD = 8               # how many records ahead the slot's cache line is asked for

cdef int64_t TOMB = <int64_t>(<uint64_t>1 << 63)    # sign bit of at_ms; slots hold only times above a hand that is >= 0
cdef int64_t AT_MASK = ~TOMB
cdef int[4] SHIFTS = [0, 10, 22, 34]                # 1 ms, 1.024 s, 70 min, 198 d
cdef int[4] BITS = [10, 12, 12, 6]


cdef struct Chunk:
    Chunk* next                 # the tail's next is the head; in a free list, the next free one
    uint16_t first              # entries in front of this one have been taken
    uint16_t used
    uint32_t segment
    Timer[42] entries


cdef struct Slot:
    Chunk* tail
    uint32_t count              # entries, tombstones included
    uint32_t tombs


cdef struct Level:
    Slot* slots                 # NULL until the first timer: a node has 64 wheels and most never need the upper levels
    uint64_t summary            # one bit per word of `bits`
    uint64_t[64] bits           # one bit per slot that is not empty


cdef struct Segment:
    Chunk* chunks               # NULL: this place in the table is free
    Chunk* spare                # chunks that came back
    uint32_t fresh              # chunks from here on were never handed out: their pages are not touched yet
    uint32_t live
    uint32_t size
    int32_t newer               # neighbours in the list of segments that have room
    int32_t older


cdef struct Overdue:
    Timer timer
    uint64_t order              # of adding; separates a timer added again from the cancel before it


cdef struct Tomb:
    Timer key                   # `word` holds 1 + the tombstone's place in the slot's log; 0: no entry here


cdef struct Split:
    # A slot too large to be resolved in one call is first spread over parts by the hash of the key, which can stop after
    # any entry. A key's entries meet in one part in log order, so each part is resolved alone, with a small table.
    Slot* slot                  # NULL: idle
    int level
    int index
    Slot* parts
    uint64_t mask               # parts - 1
    uint32_t place              # compaction: the part to be resolved next
    uint32_t unsplit            # compaction: entries of the slot still to be spread; what was appended later is not


cdef inline int level_of(int64_t tick, int64_t at_ms) noexcept nogil:
    # The highest differing bit decides, not the distance: 1023 and 1024 are 1 ms apart but lie in different turns of
    # level 0, so 1024 has to wait one level up for the cascade.
    cdef uint64_t differs = <uint64_t>(tick ^ at_ms)
    if differs < <uint64_t>1 << 10:
        return 0
    if differs < <uint64_t>1 << 22:
        return 1
    if differs < <uint64_t>1 << 34:
        return 2
    if differs < <uint64_t>1 << FAR_SHIFT:
        return 3
    return FAR


cdef inline int index_of(int level, int64_t at_ms) noexcept nogil:
    return <int>((at_ms >> SHIFTS[level]) & ((<int64_t>1 << BITS[level]) - 1))


cdef inline void mark(Level* level, int index) noexcept nogil:
    level.bits[index >> 6] |= <uint64_t>1 << (index & 63)
    level.summary |= <uint64_t>1 << (index >> 6)


cdef inline void unmark(Level* level, int index) noexcept nogil:
    level.bits[index >> 6] &= ~(<uint64_t>1 << (index & 63))
    if level.bits[index >> 6] == 0:
        level.summary &= ~(<uint64_t>1 << (index >> 6))


cdef inline int first_marked(Level* level, int start, int size) noexcept nogil:
    """First marked slot at or after `start`, or -1. Two words read, whatever the level's size."""
    cdef uint64_t word
    cdef int place = start >> 6
    if start >= size:
        return -1
    word = level.bits[place] >> (start & 63)
    if word:
        return start + wheel_lowest_bit(word)
    if place == 63:
        return -1
    word = level.summary >> (place + 1)
    if not word:
        return -1
    place += 1 + wheel_lowest_bit(word)
    return (place << 6) + wheel_lowest_bit(level.bits[place])


cdef inline uint64_t key_hash(const Timer* key) noexcept nogil:
    # Finaliser of splitmix64 (Steele et al. 2014): ids may be consecutive in tests and in imported data.
    cdef uint64_t mixed = key.id_low ^ (<uint64_t>key.at_ms * <uint64_t>0x9E3779B97F4A7C15) ^ (<uint64_t>key.version << 32)
    mixed = (mixed ^ (mixed >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * <uint64_t>0x94D049BB133111EB
    return mixed ^ (mixed >> 31)


cdef class Pool:
    """Chunks for one wheel, or for all wheels of a set, in mapped segments that are given back when empty; and the output buffer."""

    cdef Segment* segments
    cdef int32_t segment_count
    cdef int32_t room               # newest segment with room, or -1
    cdef int32_t idle               # newest wholly empty segment, or -1: reused before anything is mapped
    cdef int32_t idle_count
    cdef int64_t chunk_count        # mapped
    cdef int64_t live_count         # handed out
    cdef Tomb* scratch              # table for resolving a slot; fresh pages each time would cost as much as the work
    cdef uint64_t scratch_size
    cdef char* output
    cdef int64_t output_bytes
    cdef int64_t output_size

    def __cinit__(self):
        self.room = self.idle = -1

    def __dealloc__(self):
        cdef int32_t i
        for i in range(self.segment_count):
            if self.segments[i].chunks != NULL:
                munmap(self.segments[i].chunks, self.segments[i].size * sizeof(Chunk))
        free(self.segments)
        free(self.scratch)
        free(self.output)

    cdef int64_t reserved(self) noexcept:
        return (self.chunk_count * <int64_t>sizeof(Chunk) + self.segment_count * <int64_t>sizeof(Segment)
                + <int64_t>(self.scratch_size * sizeof(Tomb)) + self.output_size)

    cdef Tomb* take_scratch(self, uint64_t size) except NULL:
        if size > self.scratch_size:
            free(self.scratch)
            self.scratch_size = 0
            self.scratch = <Tomb*>calloc(size, sizeof(Tomb))
            if self.scratch == NULL:
                raise MemoryError(f"no memory to resolve {size} cancels")
            self.scratch_size = size
        else:
            memset(self.scratch, 0, size * sizeof(Tomb))
        return self.scratch

    cdef Chunk* take(self) except NULL:
        cdef Segment* segment
        cdef Chunk* chunk
        if self.room < 0:
            self.grow()
        segment = &self.segments[self.room]
        if segment.spare != NULL:
            chunk = segment.spare
            segment.spare = chunk.next
        else:
            chunk = segment.chunks + segment.fresh
            segment.fresh += 1
            chunk.segment = <uint32_t>self.room
        segment.live += 1
        self.live_count += 1
        if segment.live == segment.size:
            self.unlink(self.room)
        chunk.first = 0
        chunk.used = 0
        return chunk

    cdef void give(self, Chunk* chunk) noexcept:
        cdef int32_t index = <int32_t>chunk.segment
        cdef Segment* segment = &self.segments[index]
        if segment.live == segment.size:
            self.link(index)
        chunk.next = segment.spare
        segment.spare = chunk
        segment.live -= 1
        self.live_count -= 1
        if segment.live == 0:
            self.unlink(index)
            segment.older = self.idle
            self.idle = index
            self.idle_count += 1

    cdef inline void trim(self, int32_t most) noexcept:
        """Unmap up to `most` of the empty segments, all but one."""
        # Not where the last chunk comes back: timers spread over many slots empty all segments at nearly the same moment,
        # and unmapping 240 of them in one call stalled it for 28 ms.
        while self.idle_count > 1 and most > 0:
            self.release()
            most -= 1

    cdef void link(self, int32_t index) noexcept:
        cdef Segment* segment = &self.segments[index]
        segment.newer = -1
        segment.older = self.room
        if self.room >= 0:
            self.segments[self.room].newer = index
        self.room = index

    cdef void unlink(self, int32_t index) noexcept:
        cdef Segment* segment = &self.segments[index]
        if segment.newer >= 0:
            self.segments[segment.newer].older = segment.older
        else:
            self.room = segment.older
        if segment.older >= 0:
            self.segments[segment.older].newer = segment.newer

    cdef int grow(self) except -1:
        # As much again as there is, between the two bounds: small wheels stay small, large ones grow by a fixed, short step.
        cdef int64_t size = min(max(self.chunk_count, SEGMENT_CHUNKS_MIN), SEGMENT_CHUNKS_MAX)
        cdef int32_t index = self.idle
        cdef void* address
        cdef Segment* segment
        if index >= 0:
            self.idle = self.segments[index].older
            self.idle_count -= 1
            self.link(index)
            return 0
        index = self.free_segment()
        segment = &self.segments[index]
        address = mmap(NULL, size * sizeof(Chunk), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
        if address == MAP_FAILED:
            raise MemoryError(f"no {size * sizeof(Chunk)} bytes for timers")
        memset(segment, 0, sizeof(Segment))
        segment.chunks = <Chunk*>address
        segment.size = <uint32_t>size
        self.chunk_count += size
        self.link(index)
        return 0

    cdef int32_t free_segment(self) except -1:
        cdef int32_t i
        cdef int32_t count = max(8, 2 * self.segment_count)
        cdef Segment* larger
        for i in range(self.segment_count):
            if self.segments[i].chunks == NULL:
                return i
        larger = <Segment*>realloc(self.segments, count * sizeof(Segment))
        if larger == NULL:
            raise MemoryError("no memory for the table of segments")
        memset(larger + self.segment_count, 0, (count - self.segment_count) * sizeof(Segment))
        self.segments = larger
        i = self.segment_count
        self.segment_count = count
        return i

    cdef void release(self) noexcept:
        cdef Segment* segment = &self.segments[self.idle]
        self.idle = segment.older
        self.idle_count -= 1
        munmap(segment.chunks, segment.size * sizeof(Chunk))
        self.chunk_count -= segment.size
        segment.chunks = NULL

    cdef int emit(self, const Timer* timers, int64_t count) except -1:
        cdef int64_t need = self.output_bytes + count * TIMER_BYTES
        cdef char* larger
        if need > self.output_size:
            larger = <char*>realloc(self.output, max(2 * self.output_size, need, 4096))
            if larger == NULL:
                raise MemoryError(f"no {need} bytes for due timers")
            self.output = larger
            self.output_size = max(2 * self.output_size, need, 4096)
        memcpy(self.output + self.output_bytes, timers, count * TIMER_BYTES)
        self.output_bytes = need
        return 0

    cdef bytes take_output(self):
        cdef bytes records = PyBytes_FromStringAndSize(self.output, self.output_bytes)
        self.output_bytes = 0
        if self.output_size > OUTPUT_BYTES_KEPT:
            free(self.output)
            self.output = NULL
            self.output_size = 0
        return records


cdef class TimingWheel:
    """A wheel whose hand stands at `now_ms` (UTC milliseconds, >= 0; ValueError below)."""

    cdef Pool pool
    cdef bint pool_is_own
    cdef Level[4] levels
    cdef Slot far
    cdef Slot far_next              # what a cascade of `far` leaves there
    cdef int64_t far_min            # no entry of `far` is earlier
    cdef int64_t far_next_min
    cdef int64_t hand
    cdef int64_t tick
    cdef int cascading              # level of the slot whose cascade has begun and not ended; 0: none
    cdef int64_t entering           # start of that slot's window
    cdef int64_t timer_count        # in slots; a timer counts until its cancel has met it
    cdef int64_t chunk_count
    cdef Overdue* overdue           # heap by (at_ms, order)
    cdef int64_t overdue_count
    cdef int64_t overdue_size
    cdef uint64_t overdue_order
    cdef dict overdue_cancelled     # (at_ms, id_low, version) -> order at the cancel
    cdef Split compactor
    cdef Split drainer

    def __cinit__(self, now_ms, Pool pool=None):
        self.pool_is_own = pool is None
        self.pool = Pool() if pool is None else pool
        self.overdue_cancelled = {}
        self.hand = self.tick = checked_now(now_ms)
        self.slots_of(0)

    def __dealloc__(self):
        # Chunks are not handed back one by one: the pool goes with the last wheel that holds it.
        for level in range(LEVELS):
            free(self.levels[level].slots)
        free(self.overdue)
        free(self.compactor.parts)
        free(self.drainer.parts)

    # -- the boundary

    @property
    def hand_ms(self):
        """Every timer due up to here has been returned, apart from ones added later than that."""
        return self.hand

    @property
    def reserved_bytes(self):
        """Bytes held: chunks (of a shared pool, this wheel's share), slot tables, heap, scratch."""
        cdef int64_t total = self.pool.reserved() if self.pool_is_own else self.chunk_count * <int64_t>sizeof(Chunk)
        cdef int level
        for level in range(LEVELS):
            if self.levels[level].slots != NULL:
                total += (<int64_t>1 << BITS[level]) * <int64_t>sizeof(Slot)
        total += self.overdue_size * <int64_t>sizeof(Overdue) + parts_bytes(&self.compactor) + parts_bytes(&self.drainer)
        return total + <int64_t>sizeof(Level) * LEVELS

    def __len__(self):
        """Timers held. One with a cancel that has not met it yet still counts, so this is an upper bound."""
        return self.timer_count + self.overdue_count

    cpdef add(self, int64_t at_ms, uint64_t id_low, uint32_t version, uint32_t word):
        """Add one timer. At or before the hand: due at the next `advance`. O(1)."""
        cdef Timer timer
        timer.at_ms = at_ms
        timer.id_low = id_low
        timer.version = version
        timer.word = word
        self.insert(&timer)

    cpdef int64_t add_batch(self, bytes records) except -1:
        """Add packed records, return how many. ValueError unless the length is a multiple of 24. O(records)."""
        cdef const char* place = PyBytes_AS_STRING(records)
        cdef int64_t size = PyBytes_GET_SIZE(records)
        cdef int64_t count = size // TIMER_BYTES
        cdef int64_t i
        cdef Timer timer
        if size % TIMER_BYTES:
            raise ValueError(f"{size} bytes of timers are not a multiple of {TIMER_BYTES}")
        for i in range(count):
            if i + LOOKAHEAD < count:
                self.prefetch(place + (i + LOOKAHEAD) * TIMER_BYTES)
            memcpy(&timer, place + i * TIMER_BYTES, TIMER_BYTES)
            self.insert(&timer)
        return count

    cpdef cancel(self, int64_t at_ms, uint64_t id_low, uint32_t version):
        """Withdraw every timer with exactly this key that was added before now; unknown keys are ignored.

        O(1) amortised: a slot of one chunk is searched, a longer one gets a tombstone, and is compacted when more than a
        third of it is tombstones.
        """
        cdef Timer timer
        timer.at_ms = at_ms
        timer.id_low = id_low
        timer.version = version
        timer.word = 0
        if at_ms <= self.hand:
            self.cancel_overdue(&timer)
        else:
            self.cancel_filed(&timer)

    cpdef int64_t next_deadline(self):
        """No timer is due before this instant (ms); -1 when the wheel is empty. O(levels).

        Exact within the current 1,024 ms turn, otherwise the start of the slot to be cascaded. A slot whose timers were
        all cancelled may still be reported.
        """
        cdef int64_t when
        if self.overdue_count:
            return max(self.overdue[0].timer.at_ms, 0)
        return when if self.next_event(&when) >= 0 else -1

    cpdef bytes advance(self, int64_t now_ms, int64_t due_max):
        """Move the hand to `now_ms`, never back; return at most `due_max` due timers, oldest first, as packed records.

        Short of `now_ms` in `hand_ms`, or a `next_deadline()` not after it: a budget (`due_max`, 65,536 cascaded entries,
        16,384 timers that were added overdue) ran out, call again. Timers of one ms come in no particular order.
        O(returned + cascaded). Raises ValueError for due_max < 1.
        """
        cdef int64_t budget = CASCADE_MAX
        if due_max < 1:
            raise ValueError(f"due_max {due_max} is below 1")
        self.pool.output_bytes = 0
        self.run(now_ms, due_max, &budget)
        self.pool.trim(TRIM_MAX)
        return self.pool.take_output()

    cpdef clear(self, now_ms):
        """Forget every timer and set the hand to `now_ms`, which may lie before it. O(chunks)."""
        cdef int64_t now = checked_now(now_ms)
        cdef int level
        cdef int index
        cdef int following
        self.stop(&self.compactor)
        self.stop(&self.drainer)
        for level in range(LEVELS):
            index = first_marked(&self.levels[level], 0, 1 << BITS[level])
            while index >= 0:
                following = first_marked(&self.levels[level], index + 1, 1 << BITS[level])
                if following >= 0:
                    wheel_prefetch(self.levels[level].slots[following].tail)
                self.empty(&self.levels[level].slots[index])
                unmark(&self.levels[level], index)
                index = following
            if level:
                free(self.levels[level].slots)
                self.levels[level].slots = NULL
        self.empty(&self.far)
        self.empty(&self.far_next)
        free(self.overdue)
        self.overdue = NULL
        self.overdue_count = self.overdue_size = 0
        self.overdue_cancelled.clear()
        self.timer_count = 0
        self.cascading = 0
        self.hand = self.tick = now
        self.pool.trim(self.pool.idle_count)

    # -- filing

    cdef inline int insert(self, Timer* timer) except -1:
        if timer.at_ms <= self.hand:
            return self.push_overdue(timer)
        self.file(timer, timer.at_ms, self.tick)
        self.timer_count += 1
        return 0

    cdef inline void prefetch(self, const char* record) noexcept:
        # At 10M timers each append misses the cache on its slot and on its chunk; asking for the slot early hides the first.
        cdef int64_t at_ms
        cdef int level
        memcpy(&at_ms, record, sizeof(at_ms))
        if at_ms <= self.hand:
            return
        level = level_of(self.tick, at_ms)
        if level < FAR and self.levels[level].slots != NULL:
            wheel_prefetch(&self.levels[level].slots[index_of(level, at_ms)])

    cdef inline int file(self, Timer* timer, int64_t at_ms, int64_t tick) except -1:
        """Append an entry to the slot that `at_ms` has when the wheel stands at `tick`."""
        cdef int level = level_of(tick, at_ms)
        cdef int index
        if level == FAR:
            return self.file_far(timer, at_ms, tick)
        index = index_of(level, at_ms)
        if self.levels[level].slots == NULL:
            self.slots_of(level)
        self.append(&self.levels[level].slots[index], timer)
        mark(&self.levels[level], index)
        return 0

    cdef int file_far(self, Timer* timer, int64_t at_ms, int64_t tick) except -1:
        # While `far` is being cascaded everything new still goes through it: were a tombstone put straight into
        # `far_next`, the timer it is for could arrive there after it and survive.
        if self.cascading == FAR and tick == self.entering:
            self.far_next_min = at_ms if self.far_next.count == 0 else min(self.far_next_min, at_ms)
            return self.append(&self.far_next, timer)
        self.far_min = at_ms if self.far.count == 0 else min(self.far_min, at_ms)
        return self.append(&self.far, timer)

    cdef int slots_of(self, int level) except -1:
        self.levels[level].slots = <Slot*>calloc(1 << BITS[level], sizeof(Slot))
        if self.levels[level].slots == NULL:
            raise MemoryError(f"no memory for level {level}")
        return 0

    cdef inline int append(self, Slot* slot, const Timer* timer) except -1:
        cdef Chunk* tail = slot.tail
        if tail == NULL or tail.used == CHUNK_ENTRIES:
            tail = self.lengthen(slot)
        tail.entries[tail.used] = timer[0]
        tail.used += 1
        slot.count += 1
        slot.tombs += timer.at_ms < 0
        return 0

    cdef Chunk* lengthen(self, Slot* slot) except NULL:
        cdef Chunk* chunk = self.pool.take()
        self.chunk_count += 1
        if slot.tail == NULL:
            chunk.next = chunk
        else:
            chunk.next = slot.tail.next
            slot.tail.next = chunk
        slot.tail = chunk
        return chunk

    cdef void drop_head(self, Slot* slot) noexcept:
        cdef Chunk* head = slot.tail.next
        if head == slot.tail:
            slot.tail = NULL
        else:
            slot.tail.next = head.next
        self.pool.give(head)
        self.chunk_count -= 1

    cdef void empty(self, Slot* slot) noexcept:
        while slot.tail != NULL:
            self.drop_head(slot)
        slot.count = slot.tombs = 0

    # -- moving the hand

    cdef int next_event(self, int64_t* when) noexcept:
        """Level of the slot to be drained (0) or cascaded (above) next and the tick at which that must happen; -1: none."""
        cdef int level
        cdef int index
        cdef int turn
        if self.cascading:
            # The levels below are partly filled for the window ahead and must not be read against the old tick.
            when[0] = self.entering
            return self.cascading
        index = first_marked(&self.levels[0], index_of(0, self.tick), 1 << BITS[0])
        if index >= 0:
            when[0] = ((self.tick >> BITS[0]) << BITS[0]) | index
            return 0
        for level in range(1, LEVELS):
            index = first_marked(&self.levels[level], index_of(level, self.tick) + 1, 1 << BITS[level])
            if index >= 0:
                turn = SHIFTS[level] + BITS[level]
                when[0] = ((self.tick >> turn) << turn) | (<int64_t>index << SHIFTS[level])
                return level
        if self.far.count:
            when[0] = (self.far_min >> FAR_SHIFT) << FAR_SHIFT
            return FAR
        return -1

    cdef int64_t run(self, int64_t now_ms, int64_t due_max, int64_t* budget) except -1:
        """Put up to `due_max` due timers into the pool's output; how many. Takes what it cascades from `budget`."""
        cdef int64_t when = 0
        cdef int64_t start_bytes = self.pool.output_bytes
        cdef int64_t left = due_max
        cdef int level
        if self.overdue_count:
            left -= self.pop_overdue(min(due_max, <int64_t>OVERDUE_MAX))
        while self.overdue_count == 0:
            level = self.next_event(&when)
            if level < 0 or when > now_ms:
                if now_ms > self.hand:
                    self.hand = self.tick = now_ms
                break
            self.hand = max(self.hand, when - 1)
            if left == 0:
                break
            if level == 0:
                self.tick = when
                if not self.drain(index_of(0, when), &left, budget):
                    break
                self.hand = when
            elif not self.cascade(level, when, budget):
                break
        return (self.pool.output_bytes - start_bytes) // TIMER_BYTES

    cdef bint cascade(self, int level, int64_t when, int64_t* budget) except -1:
        """Move the slot that starts at `when` to the levels below, as far as the budget goes; whether it is done.

        Until it is, the tick stays in front of the window, so new timers and tombstones for it join the slot's tail: each
        tombstone still follows its timer down, whether that one has been moved already or not.
        """
        cdef Slot* slot = &self.far if level == FAR else &self.levels[level].slots[index_of(level, when)]
        cdef Chunk* head
        cdef Timer* timer
        if not self.cascading:
            if self.compactor.slot == slot:
                self.stop(&self.compactor)
            self.cascading = level
            self.entering = when
            self.tick = when - 1
        while slot.tail != NULL:
            head = slot.tail.next
            if head.next != head:
                wheel_prefetch_chunk(<const char*>head.next)    # a kilobyte is too short for the hardware to see it coming
            while head.first < head.used:
                if budget[0] <= 0:
                    return False
                timer = &head.entries[head.first]
                if head.first + LOOKAHEAD < head.used:
                    self.prefetch_below(&head.entries[head.first + LOOKAHEAD], when)
                self.file(timer, timer.at_ms & AT_MASK, when)
                slot.count -= 1
                slot.tombs -= timer.at_ms < 0
                head.first += 1
                budget[0] -= 1
            self.drop_head(slot)
        if level == FAR:
            self.far = self.far_next
            self.far_min = self.far_next_min
            memset(&self.far_next, 0, sizeof(Slot))
        else:
            unmark(&self.levels[level], index_of(level, when))
        self.cascading = 0
        self.tick = when
        return True

    cdef inline void prefetch_below(self, const Timer* timer, int64_t when) noexcept:
        cdef int64_t at_ms = timer.at_ms & AT_MASK
        cdef int level = level_of(when, at_ms)
        if level < FAR and self.levels[level].slots != NULL:
            wheel_prefetch(&self.levels[level].slots[index_of(level, at_ms)])

    cdef bint drain(self, int index, int64_t* left, int64_t* budget) except -1:
        """Return the timers of a level 0 slot, as far as `left` and the budget go; whether it is empty."""
        cdef Slot* slot = &self.levels[0].slots[index]
        if self.compactor.slot == slot:
            self.stop(&self.compactor)
        if self.drainer.slot == NULL and slot.tombs and slot.count > COMPACT_NOW_MAX:
            self.start(&self.drainer, slot, 0, index)
        if self.drainer.slot != NULL:
            if not self.drain_split(left, budget):
                return False
        elif not self.drain_resolved(slot, left, budget):
            return False
        unmark(&self.levels[0], index)
        return True

    cdef bint drain_resolved(self, Slot* slot, int64_t* left, int64_t* budget) except -1:
        if slot.tombs:
            if budget[0] <= 0:
                return False
            budget[0] -= 2 * <int64_t>slot.count
            self.resolve(slot)
        self.drain_plain(slot, left)
        return slot.count == 0

    cdef bint drain_split(self, int64_t* left, int64_t* budget) except -1:
        # What was added or cancelled since the last call is spread first, so a tombstone reaches its part, and there its
        # timer, before that part is returned.
        cdef uint64_t place
        if not self.spread(&self.drainer, self.drainer.slot.count, budget):
            return False
        for place in range(self.drainer.mask + 1):
            if not self.drain_resolved(&self.drainer.parts[place], left, budget):
                return False
        self.stop(&self.drainer)
        return True

    cdef int drain_plain(self, Slot* slot, int64_t* left) except -1:
        cdef Chunk* head
        cdef int64_t count
        while slot.tail != NULL and left[0] > 0:
            head = slot.tail.next
            if head.next != head:
                wheel_prefetch(head.next)
            count = min(<int64_t>(head.used - head.first), left[0])
            self.pool.emit(&head.entries[head.first], count)
            head.first += <uint16_t>count
            slot.count -= <uint32_t>count
            self.timer_count -= count
            left[0] -= count
            if head.first == head.used:
                self.drop_head(slot)
        return 0

    # -- cancelling

    cdef int cancel_filed(self, Timer* key) except -1:
        cdef int level = level_of(self.tick, key.at_ms)
        cdef int index = 0 if level == FAR else index_of(level, key.at_ms)
        cdef bint moving = self.cascading != 0 and level == self.cascading and (
            level == FAR or index == index_of(level, self.entering))
        cdef Slot* slot
        if level < FAR and self.levels[level].slots == NULL:
            return 0
        slot = &self.far if level == FAR else &self.levels[level].slots[index]
        if moving or slot == self.compactor.slot or slot == self.drainer.slot:
            # The timer may have left this chain already, for a level below or a part: only a tombstone can follow it.
            self.append_tomb(slot, key)
        elif slot.count == 0:
            return 0
        elif slot.tail.next == slot.tail:
            self.remove_from_chunk(slot, key, level, index)
        else:
            self.append_tomb(slot, key)
            self.compact_if_worth(slot, level, index)
        if self.compactor.slot != NULL:
            self.compact_step()
        return 0

    cdef int append_tomb(self, Slot* slot, const Timer* key) except -1:
        cdef Timer tomb = key[0]
        tomb.at_ms |= TOMB
        self.append(slot, &tomb)
        if slot == &self.far:
            self.far_min = min(self.far_min, key.at_ms)
        return 0

    cdef int remove_from_chunk(self, Slot* slot, const Timer* key, int level, int index) except -1:
        cdef Chunk* chunk = slot.tail
        cdef Timer* entries = chunk.entries
        cdef int place = chunk.first
        while place < chunk.used:
            if same_key(&entries[place], key):
                memmove(&entries[place], &entries[place + 1], (chunk.used - place - 1) * sizeof(Timer))
                chunk.used -= 1
                slot.count -= 1
                self.timer_count -= 1
            else:
                place += 1
        if slot.count == 0:
            self.drop_head(slot)
            if level < FAR:
                unmark(&self.levels[level], index)
        return 0

    cdef int compact_if_worth(self, Slot* slot, int level, int index) except -1:
        if 3 * <uint64_t>slot.tombs <= slot.count:
            return 0
        if slot.count <= COMPACT_NOW_MAX:
            self.resolve(slot)
            if slot.count == 0 and level < FAR:
                unmark(&self.levels[level], index)
        elif self.compactor.slot == NULL:
            self.start(&self.compactor, slot, level, index)
        return 0

    cdef int compact_step(self) except -1:
        """A share of the compaction under way: some entries spread, or one part resolved."""
        cdef int64_t budget = COMPACT_STEP
        cdef Split* work = &self.compactor
        cdef uint32_t count = min(work.unsplit, <uint32_t>COMPACT_STEP)
        if count:
            work.unsplit -= count
            self.spread(work, count, &budget)
        elif work.place <= work.mask:
            self.resolve(&work.parts[work.place])
            work.place += 1
        else:
            self.stop(work)
        return 0

    cdef int resolve(self, Slot* slot) except -1:
        """Take the tombstones out of a slot, and the timers they are for. O(entries)."""
        cdef uint64_t size = 16
        cdef Tomb* table
        if slot.tombs == 0:
            return 0
        while size < 2 * <uint64_t>slot.tombs:
            size *= 2
        table = self.pool.take_scratch(size)
        gather(slot, table, size - 1)
        self.sift(slot, table, size - 1)
        return 0

    cdef void sift(self, Slot* slot, const Tomb* table, uint64_t mask) noexcept:
        """Write the survivors over the slot's own chunks, from the first on: writing never overtakes reading."""
        cdef Chunk* chunk = slot.tail
        cdef Chunk* target = slot.tail.next
        cdef Timer timer
        cdef uint32_t seen = 0
        cdef uint32_t kept = 0
        cdef int filled = 0
        cdef int place
        while seen < slot.count:
            chunk = chunk.next
            wheel_prefetch_chunk(<const char*>chunk.next)
            for place in range(chunk.first, chunk.used):
                timer = chunk.entries[place]
                seen += 1
                if timer.at_ms < 0:
                    continue
                if is_cancelled(table, mask, &timer, seen):
                    self.timer_count -= 1
                    continue
                if filled == CHUNK_ENTRIES:
                    set_entries(target, filled)     # read to its end already: this entry is from a later chunk
                    target = target.next
                    filled = 0
                target.entries[filled] = timer
                filled += 1
                kept += 1
        set_entries(target, filled)
        self.drop_behind(slot, target)
        slot.count = kept
        slot.tombs = 0
        if kept == 0:
            self.drop_head(slot)

    cdef void drop_behind(self, Slot* slot, Chunk* last) noexcept:
        cdef Chunk* head = slot.tail.next
        cdef Chunk* chunk = last.next
        cdef Chunk* following
        while chunk != head:
            following = chunk.next
            self.pool.give(chunk)
            self.chunk_count -= 1
            chunk = following
        last.next = head
        slot.tail = last

    cdef inline void drop_entry(self, Slot* slot) noexcept:
        cdef Chunk* head = slot.tail.next
        slot.count -= 1
        slot.tombs -= head.entries[head.first].at_ms < 0
        head.first += 1
        if head.first == head.used:
            self.drop_head(slot)

    cdef int start(self, Split* work, Slot* slot, int level, int index) except -1:
        cdef uint64_t count = 2
        while count < PARTS_MAX and count * PART_ENTRIES < slot.count:
            count *= 2
        memset(work, 0, sizeof(Split))
        work.parts = <Slot*>calloc(count, sizeof(Slot))
        if work.parts == NULL:
            raise MemoryError(f"no memory to split a slot of {slot.count}")
        work.mask = count - 1
        work.slot = slot
        work.level = level
        work.index = index
        work.unsplit = slot.count
        return 0

    cdef bint spread(self, Split* work, uint32_t count, int64_t* budget) except -1:
        """Move the first `count` entries of the slot into its parts, as far as the budget goes; whether all were."""
        cdef Timer key
        cdef Timer* entry
        while count:
            if budget[0] <= 0:
                return False
            entry = &work.slot.tail.next.entries[work.slot.tail.next.first]
            key = entry[0]
            key.at_ms &= AT_MASK
            # The high half of the hash: the low one picks the place in the table, and must not be the same for a whole part.
            self.append(&work.parts[(key_hash(&key) >> 32) & work.mask], entry)
            self.drop_entry(work.slot)
            count -= 1
            budget[0] -= 1
        return True

    cdef void stop(self, Split* work) noexcept:
        """End a split at any point: the parts go back in front of what has not been spread."""
        cdef uint64_t place
        if work.slot == NULL:
            return
        for place in range(work.mask + 1):
            put_in_front(work.slot, &work.parts[place])
        if work.slot.count == 0 and work.level < FAR:
            unmark(&self.levels[work.level], work.index)
        free(work.parts)
        memset(work, 0, sizeof(Split))

    # -- added overdue

    cdef int push_overdue(self, const Timer* timer) except -1:
        cdef Overdue node
        cdef Overdue* larger
        cdef int64_t size = max(16, 2 * self.overdue_size)
        if self.overdue_count == self.overdue_size:
            larger = <Overdue*>realloc(self.overdue, size * sizeof(Overdue))    # large blocks are remapped, not copied
            if larger == NULL:
                raise MemoryError(f"no memory for {size} overdue timers")
            self.overdue = larger
            self.overdue_size = size
        node.timer = timer[0]
        node.order = self.overdue_order
        self.overdue_order += 1
        self.overdue_count += 1
        self.sift_up(self.overdue_count - 1, &node)
        return 0

    cdef int64_t pop_overdue(self, int64_t due_max) except -1:
        cdef int64_t due = 0
        cdef int64_t seen = 0
        cdef Overdue node
        while self.overdue_count and due < due_max and seen < OVERDUE_MAX:
            node = self.overdue[0]
            if not self.overdue_cancelled or not self.overdue_is_cancelled(&node):
                self.pool.emit(&node.timer, 1)
                due += 1
            seen += 1
            self.overdue_count -= 1
            if self.overdue_count:
                self.sift_down(0, &self.overdue[self.overdue_count])
        if self.overdue_count == 0:
            free(self.overdue)
            self.overdue = NULL
            self.overdue_size = 0
            self.overdue_cancelled.clear()
        return due

    cdef int cancel_overdue(self, const Timer* key) except -1:
        if self.overdue_count == 0:
            return 0
        self.overdue_cancelled[(key.at_ms, key.id_low, key.version)] = self.overdue_order
        # As for slots: cancels of what is not there must not pile up.
        if 2 * <int64_t>len(self.overdue_cancelled) > self.overdue_count + 64:
            self.compact_overdue()
        return 0

    cdef int compact_overdue(self) except -1:
        cdef int64_t i
        cdef int64_t kept = 0
        cdef Overdue node
        for i in range(self.overdue_count):
            if not self.overdue_is_cancelled(&self.overdue[i]):
                self.overdue[kept] = self.overdue[i]
                kept += 1
        self.overdue_count = kept
        self.overdue_cancelled.clear()
        for i in range(kept // 2 - 1, -1, -1):
            node = self.overdue[i]
            self.sift_down(i, &node)
        return 0

    cdef bint overdue_is_cancelled(self, const Overdue* node) except -1:
        cancelled_at = self.overdue_cancelled.get((node.timer.at_ms, node.timer.id_low, node.timer.version))
        return cancelled_at is not None and node.order < <uint64_t>cancelled_at

    cdef void sift_up(self, int64_t place, const Overdue* node) noexcept:
        cdef int64_t parent
        while place:
            parent = (place - 1) >> 1
            if not earlier(node, &self.overdue[parent]):
                break
            self.overdue[place] = self.overdue[parent]
            place = parent
        self.overdue[place] = node[0]

    cdef void sift_down(self, int64_t place, const Overdue* moved) noexcept:
        cdef Overdue node = moved[0]
        cdef int64_t child = 2 * place + 1
        while child < self.overdue_count:
            if child + 1 < self.overdue_count and earlier(&self.overdue[child + 1], &self.overdue[child]):
                child += 1
            if not earlier(&self.overdue[child], &node):
                break
            self.overdue[place] = self.overdue[child]
            place = child
            child = 2 * place + 1
        self.overdue[place] = node

    # -- the slow, obvious check

    def check(self):
        """Raise AssertionError unless counts, bitmaps, places and the heap agree. O(everything)."""
        cdef int level
        cdef int index
        cdef int64_t i
        cdef Slot* slot
        timers = chunks = 0
        assert 0 <= self.tick <= self.hand + 1, (self.tick, self.hand)
        assert not self.cascading or self.tick == self.hand == self.entering - 1
        for level in range(LEVELS):
            for index in range(1 << BITS[level]):
                marked = bool(self.levels[level].bits[index >> 6] >> (index & 63) & 1)
                assert not marked or self.levels[level].summary >> (index >> 6) & 1
                if self.levels[level].slots == NULL:
                    assert not marked
                    continue
                slot = &self.levels[level].slots[index]
                assert marked == (slot.tail != NULL or self.compactor.slot == slot or self.drainer.slot == slot), (level, index)
                found = self.check_slot(slot, level, index)
                timers, chunks = timers + found[0], chunks + found[1]
        for found in (self.check_slot(&self.far, FAR, 0), self.check_slot(&self.far_next, FAR, 0),
                      self.check_parts(&self.compactor), self.check_parts(&self.drainer)):
            timers, chunks = timers + found[0], chunks + found[1]
        assert timers == self.timer_count, (timers, self.timer_count)
        assert chunks == self.chunk_count, (chunks, self.chunk_count)
        assert not self.pool_is_own or self.pool.live_count == chunks
        for i in range(1, self.overdue_count):
            assert not earlier(&self.overdue[i], &self.overdue[(i - 1) >> 1])

    cdef check_parts(self, Split* work):
        cdef uint64_t place
        timers = chunks = 0
        if work.slot != NULL:
            for place in range(work.mask + 1):
                found = self.check_slot(&work.parts[place], work.level, work.index)
                timers, chunks = timers + found[0], chunks + found[1]
        return timers, chunks

    cdef check_slot(self, Slot* slot, int level, int index):
        cdef Chunk* chunk = slot.tail
        cdef int64_t at_ms
        cdef int place
        cdef int64_t reference = self.entering if self.cascading and level < self.cascading else self.tick
        entries = tombs = chunks = 0
        while chunk != NULL:
            chunk = chunk.next
            chunks += 1
            assert chunk.first < chunk.used <= CHUNK_ENTRIES
            for place in range(chunk.first, chunk.used):
                at_ms = chunk.entries[place].at_ms
                entries += 1
                tombs += at_ms < 0
                at_ms &= AT_MASK
                assert at_ms > self.hand
                if level == FAR:
                    assert self.cascading or (level_of(reference, at_ms) == FAR and at_ms >= self.far_min)
                else:
                    assert level_of(reference, at_ms) == level and index_of(level, at_ms) == index, (at_ms, level, index)
            if chunk == slot.tail:
                break
        assert (entries, tombs) == (slot.count, slot.tombs), (entries, tombs, slot.count, slot.tombs)
        return entries - tombs, chunks


cdef class WheelSet:
    """`count` wheels over one pool of chunks, swept in one call; those at low indexes come first when a budget runs out."""

    cdef Pool pool
    cdef list wheels
    cdef int64_t count

    def __cinit__(self, count, now_ms):
        if count < 1:
            raise ValueError(f"count {count} is below 1")
        self.pool = Pool()
        self.wheels = [TimingWheel(now_ms, self.pool) for _ in range(count)]
        self.count = count

    def wheel(self, index):
        """The wheel at `index`; IndexError outside 0 .. count - 1."""
        if not 0 <= index < self.count:
            raise IndexError(f"wheel {index} is not in 0..{self.count - 1}")
        return self.wheels[index]

    def __getitem__(self, index):
        return self.wheel(index)

    @property
    def hand_ms(self):
        """The hand of the wheel that is furthest behind."""
        cdef TimingWheel wheel
        cdef int64_t hand = (<TimingWheel>self.wheels[0]).hand
        for wheel in self.wheels:
            hand = min(hand, wheel.hand)
        return hand

    @property
    def reserved_bytes(self):
        """Bytes held by all wheels and their pool."""
        cdef int64_t total = self.pool.reserved()
        for wheel in self.wheels:
            total += wheel.reserved_bytes - (<TimingWheel>wheel).chunk_count * <int64_t>sizeof(Chunk)
        return total

    def __len__(self):
        """Timers in all wheels, counted as by `TimingWheel`."""
        cdef TimingWheel wheel
        cdef int64_t total = 0
        for wheel in self.wheels:
            total += wheel.timer_count + wheel.overdue_count
        return total

    cpdef int64_t next_deadline(self):
        """The earliest `next_deadline` of the wheels (ms), or -1 when all are empty. O(wheels)."""
        cdef TimingWheel wheel
        cdef int64_t earliest = -1
        cdef int64_t deadline
        for wheel in self.wheels:
            deadline = wheel.next_deadline()
            if deadline >= 0 and (earliest < 0 or deadline < earliest):
                earliest = deadline
        return earliest

    cpdef list sweep(self, int64_t now_ms, int64_t due_max):
        """Advance every wheel in index order; the non-empty batches as (index, packed records).

        `due_max` and the cascade budget are shared: once `due_max` is used up the wheels behind are not touched, which their
        `hand_ms` shows. Raises ValueError for due_max < 1.
        """
        cdef list batches = []
        cdef int64_t budget = CASCADE_MAX
        cdef int64_t left = due_max
        cdef int64_t i
        cdef int64_t due
        if due_max < 1:
            raise ValueError(f"due_max {due_max} is below 1")
        for i in range(self.count):
            if left == 0:
                break
            self.pool.output_bytes = 0
            due = (<TimingWheel>self.wheels[i]).run(now_ms, left, &budget)
            if due:
                batches.append((i, self.pool.take_output()))
                left -= due
        self.pool.trim(TRIM_MAX)
        return batches

    def clear(self, now_ms):
        """Clear every wheel."""
        for wheel in self.wheels:
            wheel.clear(now_ms)

    def check(self):
        """Check every wheel, and that the pool's chunks are all theirs."""
        chunks = 0
        for wheel in self.wheels:
            wheel.check()
            chunks += (<TimingWheel>wheel).chunk_count
        assert chunks == self.pool.live_count, (chunks, self.pool.live_count)


cdef int64_t checked_now(now_ms) except -1:
    if not 0 <= now_ms < 1 << 63:
        raise ValueError(f"now_ms {now_ms} is not in 0..{(1 << 63) - 1}")
    return now_ms


cdef inline bint earlier(const Overdue* left, const Overdue* right) noexcept nogil:
    if left.timer.at_ms != right.timer.at_ms:
        return left.timer.at_ms < right.timer.at_ms
    return left.order < right.order


cdef int64_t parts_bytes(const Split* work) noexcept:
    return 0 if work.parts == NULL else <int64_t>(work.mask + 1) * <int64_t>sizeof(Slot)


cdef void put_in_front(Slot* slot, Slot* front) noexcept:
    cdef Chunk* head
    if front.tail == NULL:
        return
    if slot.tail == NULL:
        slot.tail = front.tail
    else:
        head = front.tail.next
        front.tail.next = slot.tail.next
        slot.tail.next = head
    slot.count += front.count
    slot.tombs += front.tombs


cdef void gather(Slot* slot, Tomb* table, uint64_t mask) noexcept:
    """Put a slot's tombstones into the table, each with 1 + its place in the log."""
    cdef Chunk* chunk = slot.tail
    cdef uint32_t seen = 0
    cdef int place
    cdef Timer tomb
    while True:
        chunk = chunk.next
        wheel_prefetch_chunk(<const char*>chunk.next)
        for place in range(chunk.first, chunk.used):
            seen += 1
            if chunk.entries[place].at_ms < 0:
                tomb = chunk.entries[place]
                tomb.at_ms &= AT_MASK
                tomb.word = seen
                put_tomb(table, mask, &tomb)
        if chunk == slot.tail:
            return


cdef void put_tomb(Tomb* table, uint64_t mask, const Timer* tomb) noexcept:
    # A later tombstone for the same key replaces the earlier one: it reaches further.
    cdef uint64_t place = key_hash(tomb) & mask
    while table[place].key.word and not same_key(&table[place].key, tomb):
        place = (place + 1) & mask
    table[place].key = tomb[0]


cdef inline void set_entries(Chunk* chunk, int used) noexcept:
    chunk.first = 0
    chunk.used = <uint16_t>used


cdef inline bint is_cancelled(const Tomb* table, uint64_t mask, const Timer* timer, uint32_t seen) noexcept:
    """Whether a tombstone for `timer` comes after entry number `seen` (from 1) of the log, which it is."""
    cdef uint64_t place = key_hash(timer) & mask
    while table[place].key.word:
        if same_key(&table[place].key, timer):
            return seen < table[place].key.word
        place = (place + 1) & mask
    return False
