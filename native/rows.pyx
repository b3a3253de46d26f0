# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Rows and keys of many jobs in one pass: see `wheelsched/engine/rows_pure.py` for what each function promises.

Types and functions of ours come in as arguments. Keys are big-endian, rows are made of the same bytes as in `model/rows.py` and
`model/keys.py`; `tests/contract/test_native_batches.py` holds them to it.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.object cimport PyObject
from cpython.unicode cimport PyUnicode_AsUTF8AndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from fields cimport field, field_set, place_of

cdef enum:
    ID_BYTES = 16
    JOB_HEADER_BYTES = 13
    PRIORITIES = 3
    HELD = 1
    START_DEADLINE = 2

ctypedef unsigned char* Bytes


cdef inline void put_u16(Bytes at, int value) noexcept nogil:
    at[0], at[1] = <uint8_t>(value >> 8), <uint8_t>value


cdef inline void put_u32(Bytes at, uint32_t value) noexcept nogil:
    at[0], at[1], at[2], at[3] = <uint8_t>(value >> 24), <uint8_t>(value >> 16), <uint8_t>(value >> 8), <uint8_t>value


cdef inline void put_u64(Bytes at, uint64_t value) noexcept nogil:
    put_u32(at, <uint32_t>(value >> 32))
    put_u32(at + 4, <uint32_t>value)


cdef inline Bytes new_bytes(object made) noexcept:
    return <Bytes>PyBytes_AS_STRING(made)


cdef bytes job_key(int group, int lane, int64_t fire_at_ms, const char* job_id):
    cdef bytes key = PyBytes_FromStringAndSize(NULL, 27)
    cdef Bytes at = new_bytes(key)
    put_u16(at, group)
    at[2] = <uint8_t>lane
    put_u64(at + 3, <uint64_t>fire_at_ms)
    memcpy(at + 11, job_id + 8, 8)
    memcpy(at + 19, job_id, 8)
    return key


cdef bytes time_key(bytes prefix, int64_t at_ms, const char* job_id):
    """A prefix, an instant and an id: keys of `index` and `done`."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(prefix)
    cdef bytes key = PyBytes_FromStringAndSize(NULL, size + 24)
    cdef Bytes at = new_bytes(key)
    memcpy(at, PyBytes_AS_STRING(prefix), size)
    put_u64(at + size, <uint64_t>at_ms)
    memcpy(at + size + 8, job_id + 8, 8)
    memcpy(at + size + 16, job_id, 8)
    return key


cdef bytes state_key(int group, const char* job_id):
    cdef bytes key = PyBytes_FromStringAndSize(NULL, 18)
    cdef Bytes at = new_bytes(key)
    put_u16(at, group)
    memcpy(at + 2, job_id, ID_BYTES)
    return key


cdef bytes job_row(str tenant, str queue, int64_t version, int priority, int flags, bytes spec, bytes payload):
    cdef Py_ssize_t tenant_size, queue_size, spec_size = PyBytes_GET_SIZE(spec), payload_size = PyBytes_GET_SIZE(payload)
    cdef const char* tenant_text = PyUnicode_AsUTF8AndSize(tenant, &tenant_size)
    cdef const char* queue_text = PyUnicode_AsUTF8AndSize(queue, &queue_size)
    if tenant_size > 255 or queue_size > 255:
        raise ValueError(f"a name of {max(tenant_size, queue_size)} bytes does not fit into a job row")
    cdef bytes row = PyBytes_FromStringAndSize(NULL, JOB_HEADER_BYTES + tenant_size + queue_size + spec_size + payload_size)
    cdef Bytes at = new_bytes(row)
    at[0] = 1
    put_u32(at + 1, <uint32_t>version)
    at[5], at[6], at[7], at[8] = <uint8_t>priority, <uint8_t>flags, <uint8_t>tenant_size, <uint8_t>queue_size
    put_u32(at + 9, <uint32_t>spec_size)
    at += JOB_HEADER_BYTES
    memcpy(at, tenant_text, tenant_size)
    at += tenant_size
    memcpy(at, queue_text, queue_size)
    at += queue_size
    memcpy(at, PyBytes_AS_STRING(spec), spec_size)
    memcpy(at + spec_size, PyBytes_AS_STRING(payload), payload_size)
    return row


cdef bytes index_row(int lane, int priority):
    """Of a version of 1."""
    cdef bytes row = PyBytes_FromStringAndSize(NULL, 7)
    cdef Bytes at = new_bytes(row)
    at[0], at[1], at[2] = 1, <uint8_t>lane, <uint8_t>priority
    put_u32(at + 3, 1)
    return row


cdef const char* id_of(bytes job_id) except NULL:
    if PyBytes_GET_SIZE(job_id) != ID_BYTES:
        raise ValueError(f"a job id has {ID_BYTES} bytes, not {PyBytes_GET_SIZE(job_id)}")
    return PyBytes_AS_STRING(job_id)


def create_rows(
    list commands not None, Py_ssize_t start, tuple stamps not None, kinds, calls, dict job_rows not None, dict index_rows not None,
    list tallies not None,
):
    cdef int group
    cdef int64_t stamp_ms, watermark_ms, base_ms, fire_at_ms, window_ms, spread_ms, run_at_ms, made = 0
    cdef uint64_t spread
    cdef Py_ssize_t place
    cdef int lane, priority, flags = 0, counted_priority = -1
    cdef bint held
    cdef const char* raw_id
    cdef bytes spec_bytes = None, prefix = None, job_id
    cdef str tenant = None, queue = None
    cdef list states = []
    cdef list index_values = [None] * (2 * PRIORITIES)
    cdef object one = 1, zero = 0, scheduled = 0, never = False, empty_text = "", empty = b""
    create_type, state_type = kinds
    decode_spec, queue_prefix, spread_hash = calls
    group, stamp_ms, watermark_ms = stamps[0], stamps[1], stamps[3]
    now = stamps[2]
    for place in range(start, len(commands)):
        command = commands[place]
        if type(command) is not create_type or command.fingerprint:
            break
        job_id = <bytes?>command.job_id
        raw_id = id_of(job_id)
        if command.tenant is not tenant or command.queue is not queue:
            if command.tenant != tenant or command.queue != queue:
                prefix = <bytes?>queue_prefix(group, command.tenant, command.queue)
                if made:
                    tallies.append((tenant, queue, counted_priority, made))
                    made = 0
            tenant, queue = <str?>command.tenant, <str?>command.queue
        new_spec = command.spec
        if spec_bytes is None or new_spec != spec_bytes:
            spec_bytes = <bytes?>new_spec
            spec = decode_spec(spec_bytes)
            max_attempts, initial_ms, max_ms = spec.max_attempts, spec.initial_backoff_ms, spec.max_backoff_ms
            timeout_ms, deadline_ms = spec.timeout_ms, spec.start_deadline_ms
            flags = START_DEADLINE if deadline_ms >= 0 else 0
        run_at_ms = command.run_at_ms
        base_ms = run_at_ms if run_at_ms != -1 else stamp_ms + <int64_t>command.delay_ms
        spread_ms, window_ms = command.spread_ms, command.window_ms
        if spread_ms > 0 or window_ms > 0:
            spread = spread_hash(job_id)
            if spread_ms > 0:
                base_ms += <int64_t>(spread % <uint64_t>spread_ms)
        lane, fire_at_ms = 0, base_ms
        if window_ms > 0:
            # The upper half, and nine tenths: see `context.placed`.
            lane, fire_at_ms = 1, base_ms + <int64_t>((spread >> 32) % <uint64_t>max(1, window_ms * 9 // 10))
        held = False
        if fire_at_ms <= stamp_ms:
            fire_at_ms = stamp_ms
        else:
            held = fire_at_ms <= watermark_ms
        priority = command.priority
        if not 0 <= priority < PRIORITIES:
            raise ValueError(f"priority {priority} is none")
        states.append(state_type(
            job_id, scheduled, one, tenant, queue, lane, priority, fire_at_ms, now, now, True if held else never,
            zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero, empty_text, empty, zero,
            max_attempts, initial_ms, max_ms, timeout_ms, deadline_ms, base_ms,
        ))  # fmt: skip
        job_rows[job_key(group, lane, fire_at_ms, raw_id)] = job_row(
            tenant, queue, 1, priority, flags | (HELD if held else 0), spec_bytes, <bytes?>command.payload
        )
        value = index_values[lane * PRIORITIES + priority]
        if value is None:
            value = index_values[lane * PRIORITIES + priority] = index_row(lane, priority)
        index_rows[time_key(prefix, fire_at_ms, raw_id)] = value
        if priority != counted_priority:
            if made:
                tallies.append((tenant, queue, counted_priority, made))
                made = 0
            counted_priority = priority
        made += 1
    if made:
        tallies.append((tenant, queue, counted_priority, made))
    return states


def state_rows(changed, dict states not None, dict encoded not None, int group, encode, bytes format not None, dict rows not None):
    cdef bytes packed, row
    cdef Py_ssize_t size, ahead = PyBytes_GET_SIZE(format)
    cdef Bytes at
    cdef PyObject* found
    for job_id in changed:
        state = states[job_id]
        if state is None:
            rows[state_key(group, id_of(<bytes?>job_id))] = None
            continue
        found = PyDict_GetItem(encoded, job_id)
        packed = <bytes?>encode(state) if found == NULL else <bytes?><object>found
        size = PyBytes_GET_SIZE(packed)
        row = PyBytes_FromStringAndSize(NULL, ahead + size)
        at = new_bytes(row)
        memcpy(at, PyBytes_AS_STRING(format), ahead)
        memcpy(at + ahead, PyBytes_AS_STRING(packed), size)
        rows[state_key(group, id_of(<bytes?>job_id))] = row


# --- what a leader does with created jobs ---------------------------------------------------------------------------------------

cdef enum:
    RECORD_BYTES = 24
    KIND_JOB = 0

cdef packed struct Record:
    int64_t at_ms
    uint64_t id_low
    uint32_t version
    uint32_t word


cdef inline uint64_t low_of(const char* job_id) noexcept nogil:
    cdef uint64_t low = 0
    cdef int place
    for place in range(8, 16):
        low = low << 8 | <uint8_t>job_id[place]
    return low


cdef bytes cut_to(bytes room, Py_ssize_t size):
    return room if size == PyBytes_GET_SIZE(room) else PyBytes_FromStringAndSize(PyBytes_AS_STRING(room), size)


def sort_created(list states not None, int64_t watermark_ms, int64_t loaded_precise_ms, int64_t loaded_flexible_ms, number_of):
    cdef Py_ssize_t count = len(states)
    cdef list tallies = [], odd = []
    cdef list rooms = [None] * 4  # ready and timers, of either lane
    cdef Py_ssize_t[4] used
    cdef int64_t[2] earliest
    cdef int64_t[2] loaded
    cdef int64_t fire_at_ms, made = 0, first_ms = 0
    cdef uint32_t number = 0
    cdef int priority, lane, place, counted_priority = -1
    cdef str tenant = None, queue = None
    cdef Record* record
    cdef _Places at
    for place in range(4):
        used[place] = 0
    earliest[0] = earliest[1] = -1
    loaded[0], loaded[1] = loaded_precise_ms, loaded_flexible_ms
    at = places_of(type(states[0])) if count else None
    for state in states:
        if type(state) is not at.kind:
            raise TypeError("states of one kind")
        fire_at_ms, lane, priority = field(state, at.fire_at_ms), field(state, at.lane), field(state, at.priority)
        new_tenant, new_queue = field(state, at.tenant), field(state, at.queue)
        if new_tenant is not tenant or new_queue is not queue or priority != counted_priority:
            if new_tenant != tenant or new_queue != queue or priority != counted_priority:
                if made:
                    tallies.append((tenant, queue, counted_priority, made, first_ms))
                    made = 0
                if new_tenant != tenant or new_queue != queue:
                    number = number_of(new_tenant, new_queue)
            tenant, queue, counted_priority = <str?>new_tenant, <str?>new_queue, priority
        if not made or fire_at_ms < first_ms:
            first_ms = fire_at_ms
        made += 1
        if earliest[lane] < 0 or fire_at_ms < earliest[lane]:
            earliest[lane] = fire_at_ms
        if field(state, at.held) is not False or <int64_t>field(state, at.start_deadline_ms) >= 0:
            odd.append(state)
            continue
        if fire_at_ms <= watermark_ms:
            place = lane
        elif fire_at_ms < loaded[lane]:
            place = 2 + lane
        else:
            continue
        if rooms[place] is None:
            rooms[place] = PyBytes_FromStringAndSize(NULL, count * RECORD_BYTES)
        record = <Record*>(PyBytes_AS_STRING(<bytes>rooms[place]) + used[place])
        record.at_ms, record.id_low = fire_at_ms, low_of(id_of(<bytes?>field(state, at.job_id)))
        record.version, record.word = field(state, at.version), number << 5 | <uint32_t>priority << 3 | KIND_JOB
        used[place] += RECORD_BYTES
    if made:
        tallies.append((tenant, queue, counted_priority, made, first_ms))
    cut = [b"" if rooms[place] is None else cut_to(<bytes>rooms[place], used[place]) for place in range(4)]
    return tallies, (cut[0], cut[1]), (cut[2], cut[3]), (earliest[0], earliest[1]), odd


# --- jobs that are claimed, and that succeed ------------------------------------------------------------------------------------

cdef enum:
    SCHEDULED = 0
    RUNNING = 2
    RETRYING = 3
    SUCCEEDED = 5
    OUTCOME_RUNNING = 1
    OUTCOME_SUCCEEDED = 2


cdef class _Places:
    """Where the fields of a job's state are."""

    cdef object kind
    cdef Py_ssize_t job_id, status, version, tenant, queue, lane, priority, fire_at_ms, updated_at_ms, held, attempt, fencing, lease_ms
    cdef Py_ssize_t lease_expires_at_ms, next_attempt_at_ms, first_started_at_ms, started_at_ms, finished_at_ms, outcome, worker
    cdef Py_ssize_t fingerprint, start_deadline_ms, run

    def __cinit__(self, kind):
        self.kind = kind
        self.job_id, self.status, self.version = place_of(kind, "job_id"), place_of(kind, "status"), place_of(kind, "version")
        self.tenant, self.queue, self.lane = place_of(kind, "tenant"), place_of(kind, "queue"), place_of(kind, "lane")
        self.priority, self.fire_at_ms = place_of(kind, "priority"), place_of(kind, "fire_at_ms")
        self.updated_at_ms, self.held, self.attempt = place_of(kind, "updated_at_ms"), place_of(kind, "held"), place_of(kind, "attempt")
        self.fencing, self.lease_ms = place_of(kind, "fencing"), place_of(kind, "lease_ms")
        self.lease_expires_at_ms = place_of(kind, "lease_expires_at_ms")
        self.next_attempt_at_ms = place_of(kind, "next_attempt_at_ms")
        self.first_started_at_ms = place_of(kind, "first_started_at_ms")
        self.started_at_ms, self.finished_at_ms = place_of(kind, "started_at_ms"), place_of(kind, "finished_at_ms")
        self.outcome, self.worker = place_of(kind, "outcome"), place_of(kind, "worker")
        self.fingerprint, self.start_deadline_ms = place_of(kind, "fingerprint"), place_of(kind, "start_deadline_ms")
        self.run = place_of(kind, "run")


cdef _Places _places = None


cdef _Places places_of(kind):
    global _places
    if _places is None or _places.kind is not kind:
        _places = _Places(kind)
    return _places


def claim_rows(
    list jobs not None, Py_ssize_t start, tuple stamps not None, int64_t fencing, lease_ms, str worker not None, kind,
    dict states not None, dict changed not None, list befores not None, list afters not None,
):
    cdef _Places at = places_of(kind)
    cdef int64_t watermark_ms = stamps[2], due_at_ms, version
    cdef int status
    cdef PyObject* found
    cdef object running = RUNNING, outcome = OUTCOME_RUNNING, zero = 0, now = stamps[1]
    cdef object expires = stamps[0] + lease_ms
    while start < len(jobs):
        job_id, named = <tuple?>jobs[start]
        found = PyDict_GetItem(states, job_id)
        if found == NULL or type(<object>found) is not kind:
            break
        before = <object>found
        status = field(before, at.status)
        if status == SCHEDULED:
            due_at_ms = field(before, at.fire_at_ms)
        elif status == RETRYING:
            due_at_ms = field(before, at.next_attempt_at_ms)
        else:
            break
        version = field(before, at.version)
        if due_at_ms > watermark_ms or field(before, at.held) is not False or <int64_t>field(before, at.start_deadline_ms) >= 0:
            break
        if (named and <int64_t>named != version) or field(before, at.run) is not None:
            break
        fencing += 1
        after = before.__copy__()
        field_set(after, at.status, running)
        field_set(after, at.version, version + 1)
        field_set(after, at.attempt, field(before, at.attempt) + 1)
        field_set(after, at.fencing, fencing)
        field_set(after, at.lease_ms, lease_ms)
        field_set(after, at.lease_expires_at_ms, expires)
        field_set(after, at.next_attempt_at_ms, zero)
        field_set(after, at.started_at_ms, now)
        if not field(before, at.first_started_at_ms):
            field_set(after, at.first_started_at_ms, now)
        field_set(after, at.outcome, outcome)
        field_set(after, at.worker, worker)
        field_set(after, at.updated_at_ms, now)
        states[job_id] = after
        changed[job_id] = None
        befores.append(before)
        afters.append(after)
        start += 1
    return start


cdef Bytes put_bin(Bytes at, bytes value) noexcept:
    """As msgpack writes bytes; returns where the next value goes."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(value)
    if size < 256:
        at[0], at[1] = 0xC4, <uint8_t>size
        at += 2
    elif size < 65536:
        at[0] = 0xC5
        put_u16(at + 1, <int>size)
        at += 3
    else:
        at[0] = 0xC6
        put_u32(at + 1, <uint32_t>size)
        at += 5
    memcpy(at, PyBytes_AS_STRING(value), size)
    return at + size


cdef bytes done_row(bytes packed, bytes job, bytes result):
    """Format 1, an array of four: the state, the job row, no error, the result."""
    cdef Py_ssize_t packed_size = PyBytes_GET_SIZE(packed)
    cdef bytes room = PyBytes_FromStringAndSize(NULL, packed_size + PyBytes_GET_SIZE(job) + PyBytes_GET_SIZE(result) + 14)
    cdef Bytes first = new_bytes(room)
    cdef Bytes at = first
    at[0], at[1] = 1, 0x94
    memcpy(at + 2, PyBytes_AS_STRING(packed), packed_size)
    at = put_bin(at + 2 + packed_size, job)
    at[0], at[1] = 0xC4, 0
    at = put_bin(at + 2, result)
    return PyBytes_FromStringAndSize(<const char*>first, at - first)


def succeed_rows(
    list commands not None, Py_ssize_t start, int group, now, kinds, calls, dict states not None, dict changed not None,
    dict encoded not None, dict kept_states not None, dict kept_rows not None, dict job_rows not None, dict index_rows not None,
    dict done_rows not None, list befores not None, list afters not None,
):
    complete_kind, state_kind = kinds
    encode, queue_prefix = calls
    cdef _Places at = places_of(state_kind)
    cdef PyObject* found
    cdef bytes job_id, job, prefix = None, done_prefix = None, packed, row
    cdef const char* raw_id
    cdef int64_t fire_at_ms
    cdef int lane
    cdef str tenant = None, queue = None
    cdef object succeeded = SUCCEEDED, outcome = OUTCOME_SUCCEEDED
    while start < len(commands):
        command = commands[start]
        if type(command) is not complete_kind or command.outcome != OUTCOME_SUCCEEDED:
            break
        job_id = <bytes?>command.job_id
        # A job that this entry has touched may have another row than the one kept.
        if job_id in changed:
            break
        found = PyDict_GetItem(kept_states, job_id)
        if found == NULL or type(<object>found) is not state_kind:
            break
        before = <object>found
        found = PyDict_GetItem(kept_rows, job_id)
        if found == NULL:
            break
        job = <bytes?><object>found
        if (
            <int>field(before, at.status) != RUNNING or field(before, at.fencing) != command.fencing
            or field(before, at.attempt) != command.attempt or field(before, at.fingerprint) or field(before, at.run) is not None
        ):
            break
        after = before.__copy__()
        field_set(after, at.status, succeeded)
        field_set(after, at.version, field(before, at.version) + 1)
        field_set(after, at.outcome, outcome)
        field_set(after, at.updated_at_ms, now)
        field_set(after, at.finished_at_ms, now)
        new_tenant, new_queue = field(before, at.tenant), field(before, at.queue)
        if new_tenant is not tenant or new_queue is not queue:
            if new_tenant != tenant or new_queue != queue:
                prefix = <bytes?>queue_prefix(group, new_tenant, new_queue)
                done_prefix = prefix + bytes((SUCCEEDED,))
            tenant, queue = new_tenant, new_queue
        raw_id = id_of(job_id)
        fire_at_ms, lane = field(before, at.fire_at_ms), field(before, at.lane)
        packed = <bytes?>encode(after)
        job_rows[job_key(group, lane, fire_at_ms, raw_id)] = None
        index_rows[time_key(prefix, fire_at_ms, raw_id)] = None
        done_rows[time_key(done_prefix, fire_at_ms, raw_id)] = done_row(packed, job, <bytes?>command.result)
        states[job_id] = after
        changed[job_id] = None
        encoded[job_id] = packed
        befores.append(before)
        afters.append(after)
        start += 1
    return start


def tally_moves(list befores not None, list afters not None, kind):
    cdef _Places at = places_of(kind)
    cdef Py_ssize_t place, count = len(befores)
    cdef int64_t made = 0
    cdef int old, new, priority, lane, last_old = -1, last_new = -1, last_priority = -1, last_lane = -1
    cdef str tenant = None, queue = None
    cdef list tallies = []
    if len(afters) != count:
        raise ValueError("a state after each before")
    for place in range(count):
        before, after = befores[place], afters[place]
        if type(before) is not kind or type(after) is not kind:
            raise TypeError(f"states are {kind.__name__}")
        old, new = field(before, at.status), field(after, at.status)
        priority, lane = field(before, at.priority), field(before, at.lane)
        new_tenant, new_queue = field(before, at.tenant), field(before, at.queue)
        if old != last_old or new != last_new or priority != last_priority or lane != last_lane or new_queue != queue or new_tenant != tenant:
            if made:
                tallies.append((tenant, queue, last_old, last_new, last_priority, last_lane, made))
                made = 0
            tenant, queue, last_old, last_new, last_priority, last_lane = new_tenant, new_queue, old, new, priority, lane
        made += 1
    if made:
        tallies.append((tenant, queue, last_old, last_new, last_priority, last_lane, made))
    return tallies


def needs_reading(list commands not None, create_kind, complete_kind, dict kept_states not None, dict kept_rows not None):
    cdef list rest = []
    for command in commands:
        kind = type(command)
        if kind is create_kind:
            if not command.fingerprint:
                continue
        elif kind is complete_kind:
            job_id = command.job_id
            if job_id in kept_states and job_id in kept_rows:
                continue
        rest.append(command)
    return rest


# --- claims: from ready records to jobs handed over -----------------------------------------------------------------------------

cdef enum:
    PARTITIONS = 1024
    SEEK_BYTES = 19
    FLAGS_AT = 6
    CAPPED = 4


def seeks_of(list taken not None, int group_count):
    cdef list wanted = []
    cdef bytes records, seek
    cdef Py_ssize_t place
    cdef Record record
    cdef Bytes at
    cdef int lane
    for number, packed in taken:
        lane, records = number, <bytes?>packed
        if PyBytes_GET_SIZE(records) % RECORD_BYTES:
            raise ValueError(f"{PyBytes_GET_SIZE(records)} bytes of records are not a multiple of {RECORD_BYTES}")
        for place in range(0, PyBytes_GET_SIZE(records), RECORD_BYTES):
            memcpy(&record, PyBytes_AS_STRING(records) + place, RECORD_BYTES)
            seek = PyBytes_FromStringAndSize(NULL, SEEK_BYTES)
            at = new_bytes(seek)
            put_u16(at, <int>((record.id_low & (PARTITIONS - 1)) * group_count // PARTITIONS))
            at[2] = <uint8_t>lane
            put_u64(at + 3, <uint64_t>record.at_ms)
            put_u64(at + 11, record.id_low)
            wanted.append((seek, record.version, lane, PyBytes_FromStringAndSize(PyBytes_AS_STRING(records) + place, RECORD_BYTES)))
    wanted.sort()
    return wanted


def rows_found(list wanted not None, list rows not None, kind):
    cdef dict by_group = {}
    cdef list capped = [], of_group = None
    cdef Py_ssize_t place, stale = 0
    cdef bytes seek, key, row, job_id
    cdef Bytes at
    cdef const char* raw
    cdef int group, last_group = -1
    if len(rows) != len(wanted):
        raise ValueError("a row for each seek")
    for place in range(len(wanted)):
        found = rows[place]
        if found is None:
            stale += 1
            continue
        seek, version, lane, record = <tuple?>wanted[place]
        key, row = <bytes?>(<tuple?>found)[0], <bytes?>(<tuple>found)[1]
        if PyBytes_GET_SIZE(key) != SEEK_BYTES + 8 or memcmp(PyBytes_AS_STRING(key), PyBytes_AS_STRING(seek), SEEK_BYTES) != 0:
            stale += 1
            continue
        raw = PyBytes_AS_STRING(key)
        job_id = PyBytes_FromStringAndSize(NULL, ID_BYTES)
        at = new_bytes(job_id)
        memcpy(at, raw + SEEK_BYTES, 8)
        memcpy(at + 8, raw + 11, 8)
        made = tuple.__new__(kind, (job_id, version, lane, record, row, ""))
        if PyBytes_GET_SIZE(row) > FLAGS_AT and <uint8_t>PyBytes_AS_STRING(row)[FLAGS_AT] & CAPPED:
            capped.append(made)
            continue
        group = <uint8_t>raw[0] << 8 | <uint8_t>raw[1]
        if group != last_group:
            of_group = by_group.setdefault(group, [])
            last_group = group
        of_group.append(made)
    return by_group, capped, stale


def hand_over(list founds not None, tuple states not None, int rank, decode_spec, kind, list handed not None, list order not None):
    cdef Py_ssize_t place, start, size
    cdef bytes row, spec_bytes = None
    cdef Bytes at
    cdef uint32_t spec_size, last_size = 0
    cdef const char* spec_at
    cdef int64_t order_key
    cdef Py_ssize_t dropped = 0
    spec = None
    if len(founds) != len(states):
        raise ValueError("a state for each job found")
    for place in range(len(founds)):
        state = states[place]
        if state is None:
            dropped += 1
            continue
        row = <bytes?>founds[place][4]
        size = PyBytes_GET_SIZE(row)
        at = new_bytes(row)
        if size < JOB_HEADER_BYTES or at[0] != 1:
            raise ValueError("no job row of format 1")
        spec_size = <uint32_t>at[9] << 24 | <uint32_t>at[10] << 16 | <uint32_t>at[11] << 8 | at[12]
        start = JOB_HEADER_BYTES + at[7] + at[8]
        if start + <Py_ssize_t>spec_size > size:
            raise ValueError("a job row that ends too early")
        spec_at = <const char*>(at + start)
        if spec_bytes is None or spec_size != last_size or memcmp(spec_at, PyBytes_AS_STRING(spec_bytes), spec_size) != 0:
            spec_bytes, last_size = PyBytes_FromStringAndSize(spec_at, spec_size), spec_size
            spec = decode_spec(spec_bytes)
        start += spec_size
        # rank (7 bits), lane, priority (2), fire_at (48).
        order_key = (<int64_t>rank << 3 | <int64_t>state.lane << 2 | <int64_t>state.priority) << 48 | <int64_t>state.fire_at_ms
        order.append(order_key)
        handed.append(tuple.__new__(kind, (state, spec, PyBytes_FromStringAndSize(<const char*>(at + start), size - start))))
    return dropped


# --- commands on their way into the log -----------------------------------------------------------------------------------------

cdef enum:
    CREATE_BYTES = 160
    COMPLETE_BYTES = 64

cdef int64_t NEVER_MS = 9223372036854775807


def by_group(commands not None, create_kind, complete_kind):
    cdef dict groups = {}
    cdef list of_group = None
    cdef Py_ssize_t position = 0
    cdef int64_t size, due_from_ms
    for group, command in commands:
        kind = type(command)
        due_from_ms = NEVER_MS
        if kind is create_kind:
            size = CREATE_BYTES + PyBytes_GET_SIZE(<bytes?>command.payload) + PyBytes_GET_SIZE(<bytes?>command.spec)
            if <int64_t>command.delay_ms <= 0:
                due_from_ms = command.run_at_ms
        elif kind is complete_kind:
            size = COMPLETE_BYTES + PyBytes_GET_SIZE(<bytes?>command.error) + PyBytes_GET_SIZE(<bytes?>command.result)
        else:
            return None
        of_group = <list>groups.get(group)
        if of_group is None:
            groups[group] = [[command], [position], size, due_from_ms]
        else:
            (<list>of_group[0]).append(command)
            (<list>of_group[1]).append(position)
            of_group[2] += size
            if due_from_ms < <int64_t>of_group[3]:
                of_group[3] = due_from_ms
        position += 1
    return groups
