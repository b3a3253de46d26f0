# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Batches between JSON and commands, one pass each: see `wheelsched/api/batches.py` for what each function promises.

The scanner reads a bytes object, which ends in a NUL that no JSON holds outside of an escape: a loop that stops at what it does not
expect stops there at the latest, so nothing here compares positions with an end. It takes less than the decoder does and never more:
where it is not sure it says so, and the decoder reads the same bytes.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.unicode cimport PyUnicode_AsUTF8AndSize, PyUnicode_DecodeASCII
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

ctypedef const unsigned char* Text

cdef enum:
    ITEMS_MAX = 1000
    NAME_LENGTH_MAX = 128
    SPEC_SPANS_MAX = 6
    SPEC_KEY_BYTES_MAX = 512
    DEPTH_MAX = 126  # of an item: two levels of the body are around it
    SPREAD_MS_MAX = 86400000
    ID_BYTES = 16
    ZERO = 48  # the digit

cdef int64_t DELAY_MS_MAX = 31622400000
cdef int64_t INSTANT_S_MAX = 253402300799

cdef unsigned char[256] IN_STRING  # 1: an ordinary byte of a string
cdef unsigned char[256] IN_NAME  # 1: may stand in a name, 2: and begin it
cdef unsigned char[256] IS_HEX

cdef void fill_tables() noexcept:
    cdef int byte
    for byte in range(256):
        IN_STRING[byte] = byte >= 32 and byte != b'"' and byte != b"\\"
        if b"0" <= byte <= b"9" or b"A" <= byte <= b"Z" or b"a" <= byte <= b"z":
            IN_NAME[byte] = 2
        elif byte == b"." or byte == b"_" or byte == b"-":
            IN_NAME[byte] = 1
        else:
            IN_NAME[byte] = 0
        IS_HEX[byte] = b"0" <= byte <= b"9" or b"A" <= byte <= b"F" or b"a" <= byte <= b"f"

fill_tables()


# --- any JSON value -------------------------------------------------------------------------------------------------------------


cdef inline Text skip_space(Text at) noexcept nogil:
    while at[0] == b" " or at[0] == b"\n" or at[0] == b"\r" or at[0] == b"\t":
        at += 1
    return at


cdef Text skip_string(Text at) noexcept nogil:
    """From behind the opening quote to behind the closing one; NULL for no string, and for half a surrogate pair or a whole one."""
    while True:
        while IN_STRING[at[0]]:
            at += 1
        if at[0] == b'"':
            return at + 1
        if at[0] != b"\\":
            return NULL
        at += 1
        if at[0] == b"u":
            if not (IS_HEX[at[1]] and IS_HEX[at[2]] and IS_HEX[at[3]] and IS_HEX[at[4]]):
                return NULL
            if (at[1] == b"d" or at[1] == b"D") and at[2] >= b"8":
                return NULL
            at += 5
        elif (
            at[0] == b'"' or at[0] == b"\\" or at[0] == b"/" or at[0] == b"n" or at[0] == b"t" or at[0] == b"r"
            or at[0] == b"b" or at[0] == b"f"
        ):
            at += 1
        else:
            return NULL


cdef inline bint is_digit(unsigned char byte) noexcept nogil:
    return b"0" <= byte <= b"9"


cdef Text skip_number(Text at) noexcept nogil:
    if at[0] == b"-":
        at += 1
    if at[0] == b"0":
        at += 1
    elif is_digit(at[0]):
        while is_digit(at[0]):
            at += 1
    else:
        return NULL
    if at[0] == b".":
        at += 1
        if not is_digit(at[0]):
            return NULL
        while is_digit(at[0]):
            at += 1
    if at[0] == b"e" or at[0] == b"E":
        at += 1
        if at[0] == b"+" or at[0] == b"-":
            at += 1
        if not is_digit(at[0]):
            return NULL
        while is_digit(at[0]):
            at += 1
    return at


cdef Text skip_word(Text at, const char* word) noexcept nogil:
    cdef Text letter = <Text>word
    while letter[0]:
        if at[0] != letter[0]:
            return NULL
        at += 1
        letter += 1
    return at


cdef Text skip_value(Text at, int depth) noexcept nogil:
    """From a value's first byte to behind its last; NULL for none, or one nested deeper than `depth`."""
    cdef unsigned char first = at[0]
    if first == b'"':
        return skip_string(at + 1)
    if first == b"{":
        if not depth:
            return NULL
        at = skip_space(at + 1)
        if at[0] == b"}":
            return at + 1
        while True:
            if at[0] != b'"':
                return NULL
            at = skip_string(at + 1)
            if at == NULL:
                return NULL
            at = skip_space(at)
            if at[0] != b":":
                return NULL
            at = skip_value(skip_space(at + 1), depth - 1)
            if at == NULL:
                return NULL
            at = skip_space(at)
            if at[0] == b"}":
                return at + 1
            if at[0] != b",":
                return NULL
            at = skip_space(at + 1)
    if first == b"[":
        if not depth:
            return NULL
        at = skip_space(at + 1)
        if at[0] == b"]":
            return at + 1
        while True:
            at = skip_value(at, depth - 1)
            if at == NULL:
                return NULL
            at = skip_space(at)
            if at[0] == b"]":
                return at + 1
            if at[0] != b",":
                return NULL
            at = skip_space(at + 1)
    if first == b"t":
        return skip_word(at, "true")
    if first == b"f":
        return skip_word(at, "false")
    if first == b"n":
        return skip_word(at, "null")
    return skip_number(at)


# --- values that mean something -------------------------------------------------------------------------------------------------


cdef Text read_ms(Text at, int64_t* ms) noexcept nogil:
    """Seconds with up to three decimals, as milliseconds; NULL for a number written in another way."""
    cdef int64_t whole = 0, part = 0
    cdef int digits = 0
    if at[0] == b"0" and is_digit(at[1]):
        return NULL
    while is_digit(at[0]):
        whole = whole * 10 + (at[0] - ZERO)
        at += 1
        digits += 1
        if digits > 9:
            return NULL
    if not digits:
        return NULL
    if at[0] == b".":
        at += 1
        digits = 0
        while is_digit(at[0]):
            part = part * 10 + (at[0] - ZERO)
            at += 1
            digits += 1
            if digits > 3:
                return NULL
        if not digits:
            return NULL
        while digits < 3:
            part *= 10
            digits += 1
    if at[0] == b"e" or at[0] == b"E":
        return NULL
    ms[0] = whole * 1000 + part
    return at


cdef inline int two(Text at) noexcept nogil:
    """Two digits as a number, -1 for others."""
    if is_digit(at[0]) and is_digit(at[1]):
        return (at[0] - ZERO) * 10 + (at[1] - ZERO)
    return -1


cdef inline int64_t days_of(int64_t year, int month, int day) noexcept nogil:
    """Days from 1970-01-01 (Hinnant, "chrono-Compatible Low-Level Date Algorithms"), for years from 1970 on."""
    cdef int64_t era, day_of_year, year_of_era
    year -= month <= 2
    era = year // 400
    year_of_era = year - era * 400
    day_of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146097 + year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year - 719468


cdef int days_in(int year, int month) noexcept nogil:
    if month == 2:
        return 29 if year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) else 28
    return 30 if month == 4 or month == 6 or month == 9 or month == 11 else 31


cdef Text read_instant(Text at, int64_t* ms) noexcept nogil:
    """`2026-11-05T03:34:12[.123]Z`, or with `+01:00`, from behind the opening quote to behind the closing one; NULL for anything else."""
    cdef int century, year, month, day, hour, minute, second, offset_hour, offset_minute, digits = 0, fraction = 0, sign
    if two(at) < 0 or two(at + 2) < 0 or at[4] != b"-":
        return NULL
    year = two(at) * 100 + two(at + 2)
    month = two(at + 5)
    if month < 0 or at[7] != b"-":
        return NULL
    day = two(at + 8)
    if day < 0 or at[10] != b"T":
        return NULL
    hour = two(at + 11)
    if hour < 0 or at[13] != b":":
        return NULL
    minute = two(at + 14)
    if minute < 0 or at[16] != b":":
        return NULL
    second = two(at + 17)
    if (
        second < 0 or second > 59 or minute > 59 or hour > 23 or year < 1971 or year > 9998 or month < 1 or month > 12 or day < 1
        or day > days_in(year, month)
    ):
        return NULL
    at += 19
    if at[0] == b".":
        at += 1
        while is_digit(at[0]):
            fraction = fraction * 10 + (at[0] - ZERO)
            at += 1
            digits += 1
            if digits > 3:
                return NULL
        if not digits:
            return NULL
        while digits < 3:
            fraction *= 10
            digits += 1
    ms[0] = (days_of(year, month, day) * 86400 + hour * 3600 + minute * 60 + second) * 1000 + fraction
    if at[0] == b"Z":
        at += 1
    elif at[0] == b"+" or at[0] == b"-":
        sign = -1 if at[0] == b"+" else 1
        offset_hour = two(at + 1)
        if offset_hour < 0 or offset_hour > 23 or at[3] != b":":
            return NULL
        offset_minute = two(at + 4)
        if offset_minute < 0 or offset_minute > 59:
            return NULL
        ms[0] += sign * (offset_hour * 3600 + offset_minute * 60) * 1000
        at += 6
    else:
        return NULL
    return at + 1 if at[0] == b'"' else NULL


cdef inline bint is_word(Text at, Text end, const char* word, Py_ssize_t size) noexcept nogil:
    return end - at == size and memcmp(at, word, size) == 0


# --- jobs to create -------------------------------------------------------------------------------------------------------------

cdef enum:
    QUEUE = 1
    RUN_AT = 2
    DELAY = 4
    PRIORITY = 8
    PAYLOAD = 16
    TIMING = 32
    TARGET = 64
    RETRY = 128
    TIMEOUT = 256
    DEADLINE = 512
    LABELS = 1024

cdef int member_of(Text at, Text end) noexcept nogil:
    cdef Py_ssize_t size = end - at
    if size == 5:
        if memcmp(at, "queue", 5) == 0:
            return QUEUE
        return RETRY if memcmp(at, "retry", 5) == 0 else 0
    if size == 7:
        if memcmp(at, "payload", 7) == 0:
            return PAYLOAD
        return DELAY if memcmp(at, "delay_s", 7) == 0 else 0
    if size == 6:
        if memcmp(at, "run_at", 6) == 0:
            return RUN_AT
        if memcmp(at, "timing", 6) == 0:
            return TIMING
        if memcmp(at, "target", 6) == 0:
            return TARGET
        return LABELS if memcmp(at, "labels", 6) == 0 else 0
    if size == 8:
        return PRIORITY if memcmp(at, "priority", 8) == 0 else 0
    if size == 9:
        return TIMEOUT if memcmp(at, "timeout_s", 9) == 0 else 0
    return DEADLINE if size == 16 and memcmp(at, "start_deadline_s", 16) == 0 else 0


cdef inline int priority_of(Text at, Text end) noexcept nogil:
    if is_word(at, end, "default", 7):
        return 1
    if is_word(at, end, "bulk", 4):
        return 2
    return 0 if is_word(at, end, "critical", 8) else -1


cdef class _Jobs:
    """What stays the same while the items of one body are read."""

    cdef dict specs
    cdef int64_t payload_max
    cdef int64_t run_at_max_ms
    cdef str queue  # of the job before: most batches have one
    cdef Text queue_at
    cdef Py_ssize_t queue_size
    cdef object item


cdef Text read_job(_Jobs jobs, Text start) except? NULL:
    """From an item's first byte to behind its last; NULL where all of the body is better left to the decoder. `jobs.item` is what was
    read."""
    cdef Text at, key, key_end, value, after
    cdef Text queue = NULL, payload = NULL
    cdef Py_ssize_t queue_size = 0, payload_size = 0
    cdef Text[SPEC_SPANS_MAX] span_at
    cdef Text[SPEC_SPANS_MAX] span_end
    cdef int spans = 0, seen = 0, priority = 1, member
    cdef int64_t run_at_ms = -1, delay_ms = 0
    cdef bint plain = True
    if start[0] != b"{":
        at = skip_value(start, DEPTH_MAX)
        if at != NULL:
            jobs.item = (PyBytes_FromStringAndSize(<const char*>start, at - start), b"")
        return at
    at = skip_space(start + 1)
    if at[0] == b"}":
        jobs.item = (b"{}", b"") if at == start + 1 else (PyBytes_FromStringAndSize(<const char*>start, at + 1 - start), b"")
        return at + 1
    while True:
        if at[0] != b'"':
            return NULL
        key = at + 1
        at = skip_string(key)
        if at == NULL:
            return NULL
        key_end = at - 1
        at = skip_space(at)
        if at[0] != b":":
            return NULL
        value = skip_space(at + 1)
        member = member_of(key, key_end)
        if member == 0 or seen & member:
            plain = False
        seen |= member
        after = NULL
        if member == QUEUE:
            if value[0] == b'"' and IN_NAME[value[1]] == 2:
                queue = after = value + 1
                while IN_NAME[after[0]]:
                    after += 1
                queue_size = after - queue
                after = after + 1 if after[0] == b'"' and queue_size <= NAME_LENGTH_MAX else NULL
        elif member == PAYLOAD:
            after = skip_value(value, DEPTH_MAX - 1)
            if after == NULL:
                return NULL
            payload, payload_size = value, after - value
            plain = plain and payload_size <= jobs.payload_max
        elif member == DELAY:
            after = read_ms(value, &delay_ms)
            plain = plain and delay_ms <= DELAY_MS_MAX
        elif member == RUN_AT:
            if value[0] == b'"':
                after = read_instant(value + 1, &run_at_ms)
                plain = plain and 0 <= run_at_ms <= jobs.run_at_max_ms
        elif member == PRIORITY:
            after = skip_value(value, 0)
            if after != NULL:
                priority = priority_of(value + 1, after - 1) if value[0] == b'"' else -1
                plain = plain and priority >= 0
        elif member:
            after = skip_value(value, DEPTH_MAX - 1)
            if after == NULL:
                return NULL
            if spans < SPEC_SPANS_MAX:
                span_at[spans], span_end[spans] = key - 1, after
                spans += 1
        if after == NULL:
            plain = False
            after = skip_value(value, DEPTH_MAX - 1)
            if after == NULL:
                return NULL
        at = skip_space(after)
        if at[0] == b"}":
            break
        if at[0] != b",":
            return NULL
        at = skip_space(at + 1)
    at += 1
    if not plain or not seen & QUEUE or seen & (RUN_AT | DELAY) == RUN_AT | DELAY:
        jobs.item = (PyBytes_FromStringAndSize(<const char*>start, at - start), b"")
        return at
    spec_key = b"" if not spans else spec_key_of(span_at, span_end, spans)
    spec = jobs.specs.get(spec_key)
    if spec is None:
        jobs.item = (PyBytes_FromStringAndSize(<const char*>start, at - start), spec_key if len(spec_key) <= SPEC_KEY_BYTES_MAX else b"")
        return at
    if queue_size != jobs.queue_size or memcmp(queue, jobs.queue_at, queue_size) != 0:
        jobs.queue = PyUnicode_DecodeASCII(<const char*>queue, queue_size, NULL)
        jobs.queue_at, jobs.queue_size = queue, queue_size
    jobs.item = (
        jobs.queue, priority, run_at_ms, delay_ms,
        PyBytes_FromStringAndSize(<const char*>payload, payload_size) if payload != NULL else b"null", spec,
    )  # fmt: skip
    return at


cdef bytes spec_key_of(Text* span_at, Text* span_end, int spans):
    cdef int place
    if spans == 1:
        return PyBytes_FromStringAndSize(<const char*>span_at[0], span_end[0] - span_at[0])
    return b",".join([PyBytes_FromStringAndSize(<const char*>span_at[place], span_end[place] - span_at[place]) for place in range(spans)])


def scan_jobs(bytes body not None, int64_t payload_max, int64_t run_at_max_ms, dict specs not None):
    cdef _Jobs jobs = _Jobs.__new__(_Jobs)
    cdef Text at = <Text>PyBytes_AS_STRING(body)
    cdef Text end = at + PyBytes_GET_SIZE(body)
    cdef Text key
    cdef int64_t spread_ms = 0
    cdef list items = None
    cdef bint is_spread = False
    jobs.specs, jobs.payload_max, jobs.run_at_max_ms = specs, payload_max, run_at_max_ms
    at = skip_space(at)
    if at[0] != b"{":
        return None
    at = skip_space(at + 1)
    while True:
        if at[0] != b'"':
            return None
        key = at + 1
        at = skip_string(key)
        if at == NULL:
            return None
        if is_word(key, at - 1, "jobs", 4) and items is None:
            at = skip_space(at)
            if at[0] != b":":
                return None
            at = skip_space(at + 1)
            if at[0] != b"[":
                return None
            at = skip_space(at + 1)
            items = []
            while True:
                at = read_job(jobs, at)
                if at == NULL:
                    return None
                items.append(jobs.item)
                at = skip_space(at)
                if at[0] == b"]":
                    break
                if at[0] != b"," or len(items) >= ITEMS_MAX:
                    return None
                at = skip_space(at + 1)
            at += 1
        elif is_word(key, at - 1, "spread_s", 8) and not is_spread:
            at = skip_space(at)
            if at[0] != b":":
                return None
            at = read_ms(skip_space(at + 1), &spread_ms)
            if at == NULL or spread_ms > SPREAD_MS_MAX:
                return None
            is_spread = True
        else:
            return None
        at = skip_space(at)
        if at[0] == b"}":
            break
        if at[0] != b",":
            return None
        at = skip_space(at + 1)
    if items is None or skip_space(at + 1) != end:
        return None
    return items, spread_ms


def draft_jobs(list items not None, bytes ids not None, str tenant not None, int64_t spread_ms, create, draft):
    cdef Py_ssize_t place, used = 0
    cdef const char* at = PyBytes_AS_STRING(ids)
    cdef tuple item, spec
    spread = spread_ms
    for place in range(len(items)):
        if type(items[place]) is not tuple:
            continue
        item = <tuple>items[place]
        spec = tuple_of(item[5])
        assert (used + 1) * ID_BYTES <= PyBytes_GET_SIZE(ids)
        items[place] = draft(
            create(
                PyBytes_FromStringAndSize(at + used * ID_BYTES, ID_BYTES), tenant, item[0], item[1], item[2], item[3], spec[0], spread,
                spec[1], item[4],
            ),
            spec,
        )  # fmt: skip
        used += 1


cdef inline tuple tuple_of(object spec):
    """A named tuple as a tuple: `<tuple?>` takes no subclass."""
    if not isinstance(spec, tuple):
        raise TypeError(f"a spec is a tuple, not {type(spec).__name__}")
    return <tuple>spec


# --- answers --------------------------------------------------------------------------------------------------------------------


cdef class Out:
    """Bytes that grow."""

    cdef char* data
    cdef Py_ssize_t size
    cdef Py_ssize_t room

    def __cinit__(self, Py_ssize_t room):
        self.data = <char*>PyMem_Malloc(room)
        if self.data == NULL:
            raise MemoryError
        self.room = room

    def __dealloc__(self):
        PyMem_Free(self.data)

    cdef int need(self, Py_ssize_t more) except -1:
        cdef char* grown
        cdef Py_ssize_t room
        if self.size + more > self.room:
            room = max(2 * self.room, self.size + more)
            grown = <char*>PyMem_Realloc(self.data, room)
            if grown == NULL:
                raise MemoryError
            self.data, self.room = grown, room
        return 0

    cdef inline int add(self, const char* text, Py_ssize_t size) except -1:
        if self.size + size > self.room:
            self.need(size)
        memcpy(self.data + self.size, text, size)
        self.size += size
        return 0

    cdef inline int add_bytes(self, bytes text) except -1:
        return self.add(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))

    cdef int add_text(self, str text) except -1:
        cdef Py_ssize_t size
        cdef const char* data = PyUnicode_AsUTF8AndSize(text, &size)
        return self.add(data, size)

    cdef int add_hex(self, const char* raw, Py_ssize_t size) except -1:
        cdef Py_ssize_t place
        cdef unsigned char byte
        cdef char* at
        self.need(2 * size)
        at = self.data + self.size
        for place in range(size):
            byte = raw[place]
            at[2 * place], at[2 * place + 1] = HEX[byte >> 4], HEX[byte & 15]
        self.size += 2 * size
        return 0

    cdef int add_int(self, int64_t value) except -1:
        cdef char[24] digits
        cdef int place = 24
        cdef uint64_t left = -value if value < 0 else value
        while True:
            place -= 1
            digits[place] = <char>(ZERO + left % 10)
            left //= 10
            if not left:
                break
        if value < 0:
            place -= 1
            digits[place] = b"-"
        return self.add(digits + place, 24 - place)

    cdef int add_instant(self, int64_t ms) except -1:
        """RFC 3339 in UTC, milliseconds only where they are not zero (civil_from_days of Hinnant)."""
        cdef int64_t seconds, days, era, day_of_era, year_of_era, day_of_year, month_from_march, year
        cdef int month, day, rest, of_day
        cdef char* at
        seconds = ms // 1000
        rest = <int>(ms - seconds * 1000)
        if seconds > INSTANT_S_MAX:
            seconds = INSTANT_S_MAX
        if ms < 0:
            raise ValueError("before 1970")
        days = seconds // 86400
        of_day = <int>(seconds - days * 86400)
        days += 719468
        era = days // 146097
        day_of_era = days - era * 146097
        year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36524 - day_of_era // 146096) // 365
        day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
        month_from_march = (5 * day_of_year + 2) // 153
        day = <int>(day_of_year - (153 * month_from_march + 2) // 5 + 1)
        month = <int>(month_from_march + 3 if month_from_march < 10 else month_from_march - 9)
        year = year_of_era + era * 400 + (month <= 2)
        self.need(24)
        at = self.data + self.size
        put_two(at, <int>(year // 100))
        put_two(at + 2, <int>(year % 100))
        at[4] = b"-"
        put_two(at + 5, month)
        at[7] = b"-"
        put_two(at + 8, day)
        at[10] = b"T"
        put_two(at + 11, of_day // 3600)
        at[13] = b":"
        put_two(at + 14, of_day // 60 % 60)
        at[16] = b":"
        put_two(at + 17, of_day % 60)
        if not rest:
            at[19] = b"Z"
            self.size += 20
            return 0
        at[19] = b"."
        at[20] = <char>(ZERO + rest // 100)
        put_two(at + 21, rest % 100)
        at[23] = b"Z"
        self.size += 24
        return 0


cdef const char* HEX = "0123456789abcdef"


cdef inline void put_two(char* at, int value) noexcept nogil:
    at[0] = <char>(ZERO + value // 10)
    at[1] = <char>(ZERO + value % 10)


cdef tuple PRIORITIES = (b'"critical"', b'"default"', b'"bulk"')


def created_json(list drafts not None, list replies not None, list others):
    cdef Out out = Out(1024 + 1024 * len(drafts))
    cdef Py_ssize_t place, used = 0
    cdef bytes job_id
    cdef tuple spec
    cdef int64_t fire_at_ms, run_at_ms, created_at_ms, updated_at_ms
    out.add('{"results":[', 12)
    for place in range(len(drafts)):
        if place:
            out.add(",", 1)
        draft = drafts[place]
        other = None if others is None else others[place]
        if other is not None:
            out.add_bytes(<bytes?>other)
            continue
        reply = replies[place]
        if others is None and (reply is None or reply.refusal or reply.replayed):
            return None
        state = reply.state
        command = draft.command
        spec = tuple_of(draft.spec)
        fire_at_ms, run_at_ms, created_at_ms = state.fire_at_ms, state.run_at_ms, state.created_at_ms
        updated_at_ms = state.updated_at_ms
        job_id = <bytes?>state.job_id
        out.add('{"status":201,"job":{"job_id":"job_', 35)
        out.add_hex(PyBytes_AS_STRING(job_id), PyBytes_GET_SIZE(job_id))
        out.add('","queue":"', 11)
        out.add_text(<str?>state.queue)
        if fire_at_ms <= created_at_ms and not state.held:
            out.add('","status":"QUEUED","run_at":"', 30)
        else:
            out.add('","status":"SCHEDULED","run_at":"', 33)
        out.add_instant(run_at_ms)
        out.add('","fire_at":"', 13)
        out.add_instant(fire_at_ms)
        out.add('","timing":', 11)
        out.add_bytes(<bytes?>spec[3])
        out.add(',"priority":', 12)
        out.add_bytes(<bytes>PRIORITIES[<int>state.priority])
        out.add(',"target":', 10)
        out.add_bytes(<bytes?>spec[5])
        out.add(',"payload":', 11)
        out.add_bytes(<bytes?>command.payload)
        out.add_bytes(<bytes?>spec[4])
        out.add(',"version":', 11)
        out.add_int(state.version)
        out.add(',"attempt":', 11)
        out.add_int(state.attempt)
        out.add(',"created_at":"', 15)
        out.add_instant(created_at_ms)
        out.add('","updated_at":"', 16)
        out.add_instant(updated_at_ms)
        out.add('"}}', 3)
    out.add("]}", 2)
    return PyBytes_FromStringAndSize(out.data, out.size)


# --- attempts that end ----------------------------------------------------------------------------------------------------------

cdef enum:
    TOKEN_HEX = 56
    TOKEN_BYTES = 28

cdef enum:
    TOKEN = 1
    OUTCOME = 2
    ERROR = 4
    RESULT = 8
    RETRY_AFTER = 16

cdef int64_t BACKOFF_MS_MAX = 31622400000


cdef int end_member_of(Text at, Text end) noexcept nogil:
    cdef Py_ssize_t size = end - at
    if size == 5:
        if memcmp(at, "token", 5) == 0:
            return TOKEN
        return ERROR if memcmp(at, "error", 5) == 0 else 0
    if size == 7:
        return OUTCOME if memcmp(at, "outcome", 7) == 0 else 0
    if size == 6:
        return RESULT if memcmp(at, "result", 6) == 0 else 0
    return RETRY_AFTER if size == 13 and memcmp(at, "retry_after_s", 13) == 0 else 0


cdef inline int nibble(unsigned char byte) noexcept nogil:
    if is_digit(byte):
        return byte - ZERO
    return byte - 87 if b"a" <= byte <= b"f" else -1


cdef Text read_token(Text at, unsigned char* raw) noexcept nogil:
    """From behind the opening quote to behind the closing one; NULL where it is no token."""
    cdef int place, high, low
    if at[0] != b"a" or at[1] != b"t" or at[2] != b"t" or at[3] != b"_":
        return NULL
    at += 4
    for place in range(TOKEN_BYTES):
        high = nibble(at[0])
        if high < 0:
            return NULL
        low = nibble(at[1])
        if low < 0:
            return NULL
        raw[place] = <unsigned char>(high << 4 | low)
        at += 2
    return at + 1 if at[0] == b'"' else NULL


cdef int outcome_of(Text at, Text end, tuple outcomes) except -2:
    """The number of an outcome by its name: `outcomes` are those of succeeded, retryable_failure, fatal_failure, cancelled."""
    if is_word(at, end, "succeeded", 9):
        return outcomes[0]
    if is_word(at, end, "retryable_failure", 17):
        return outcomes[1]
    if is_word(at, end, "fatal_failure", 13):
        return outcomes[2]
    if is_word(at, end, "cancelled", 9):
        return outcomes[3]
    return -1


cdef Text read_end(Text start, int64_t result_max, int64_t error_max, tuple outcomes, list items) except? NULL:
    cdef Text at, key, key_end, value, after
    cdef Text error = NULL, result = NULL
    cdef Py_ssize_t error_size = 0, result_size = 0
    cdef int seen = 0, member, outcome = -1, place
    cdef int64_t retry_after_ms = -1
    cdef unsigned char[TOKEN_BYTES] raw
    cdef uint64_t fencing = 0
    cdef uint32_t attempt = 0
    cdef bint plain = True
    if start[0] != b"{":
        at = skip_value(start, DEPTH_MAX)
        if at != NULL:
            items.append(PyBytes_FromStringAndSize(<const char*>start, at - start))
        return at
    at = skip_space(start + 1)
    if at[0] == b"}":
        items.append(PyBytes_FromStringAndSize(<const char*>start, at + 1 - start))
        return at + 1
    while True:
        if at[0] != b'"':
            return NULL
        key = at + 1
        at = skip_string(key)
        if at == NULL:
            return NULL
        key_end = at - 1
        at = skip_space(at)
        if at[0] != b":":
            return NULL
        value = skip_space(at + 1)
        member = end_member_of(key, key_end)
        if member == 0 or seen & member:
            plain = False
        seen |= member
        after = NULL
        if member == TOKEN:
            if value[0] == b'"':
                after = read_token(value + 1, raw)
        elif member == RETRY_AFTER:
            after = read_ms(value, &retry_after_ms)
            plain = plain and retry_after_ms <= BACKOFF_MS_MAX
        elif member:
            after = skip_value(value, DEPTH_MAX - 1)
            if after == NULL:
                return NULL
            if member == OUTCOME:
                outcome = outcome_of(value + 1, after - 1, outcomes) if value[0] == b'"' else -1
                plain = plain and outcome >= 0
            elif member == ERROR:
                error, error_size = value, after - value
                plain = plain and error_size <= error_max and (value[0] == b'"' or value[0] == b"{")
            else:
                result, result_size = value, after - value
                plain = plain and result_size <= result_max
        if after == NULL:
            plain = False
            after = skip_value(value, DEPTH_MAX - 1)
            if after == NULL:
                return NULL
        at = skip_space(after)
        if at[0] == b"}":
            break
        if at[0] != b",":
            return NULL
        at = skip_space(at + 1)
    at += 1
    if not plain or seen & (TOKEN | OUTCOME) != TOKEN | OUTCOME:
        items.append(PyBytes_FromStringAndSize(<const char*>start, at - start))
        return at
    for place in range(16, 20):
        attempt = attempt << 8 | raw[place]
    for place in range(20, 28):
        fencing = fencing << 8 | raw[place]
    items.append((
        PyBytes_FromStringAndSize(<const char*>raw, 16), attempt, fencing, outcome,
        PyBytes_FromStringAndSize(<const char*>error, error_size) if error != NULL else b"",
        PyBytes_FromStringAndSize(<const char*>result, result_size) if result != NULL else b"", retry_after_ms,
    ))  # fmt: skip
    return at


def scan_completions(bytes body not None, int64_t result_max, int64_t error_max, tuple outcomes not None):
    cdef Text at = skip_space(<Text>PyBytes_AS_STRING(body))
    cdef Text end = <Text>PyBytes_AS_STRING(body) + PyBytes_GET_SIZE(body)
    cdef Text key
    cdef list items = []
    if at[0] != b"{":
        return None
    at = skip_space(at + 1)
    if at[0] != b'"':
        return None
    key = at + 1
    at = skip_string(key)
    if at == NULL or not is_word(key, at - 1, "completions", 11):
        return None
    at = skip_space(at)
    if at[0] != b":":
        return None
    at = skip_space(at + 1)
    if at[0] != b"[":
        return None
    at = skip_space(at + 1)
    while True:
        at = read_end(at, result_max, error_max, outcomes, items)
        if at == NULL:
            return None
        at = skip_space(at)
        if at[0] == b"]":
            break
        if at[0] != b"," or len(items) >= ITEMS_MAX:
            return None
        at = skip_space(at + 1)
    at = skip_space(at + 1)
    if at[0] != b"}" or skip_space(at + 1) != end:
        return None
    return items


def ended_json(list replies not None, list others not None, tuple status_names not None, int retrying):
    cdef Out out = Out(64 + 128 * len(replies))
    cdef Py_ssize_t place
    cdef int status
    cdef bytes job_id
    out.add('{"results":[', 12)
    for place in range(len(replies)):
        if place:
            out.add(",", 1)
        other = others[place]
        if other is not None:
            out.add_bytes(<bytes?>other)
            continue
        state = replies[place].state
        status = state.status
        job_id = <bytes?>state.job_id
        out.add('{"status":200,"job_id":"job_', 28)
        out.add_hex(PyBytes_AS_STRING(job_id), PyBytes_GET_SIZE(job_id))
        out.add('","job_status":"', 16)
        out.add_text(<str?>status_names[status])
        if status == retrying:
            out.add('","next_attempt_at":"', 21)
            out.add_instant(state.next_attempt_at_ms)
        out.add('"}', 2)
    out.add("]}", 2)
    return PyBytes_FromStringAndSize(out.data, out.size)


# --- claimed jobs ---------------------------------------------------------------------------------------------------------------


def claimed_json(list jobs not None, words, others):
    cdef Out out = Out(64 + 1024 * len(jobs))
    cdef Py_ssize_t place
    cdef bytes job_id, head, tail, payload
    cdef const char* raw_id
    cdef int64_t fire_at_ms, key_at_ms
    cdef uint64_t fencing
    cdef uint32_t attempt
    cdef unsigned char[12] number
    cdef int shift
    last = None
    head = tail = b""
    out.add('{"jobs":[', 9)
    for place in range(len(jobs)):
        if place:
            out.add(",", 1)
        state, spec, content = jobs[place]
        if state.run is not None:
            out.add_bytes(<bytes?>others(jobs[place]))
            continue
        if spec is not last:
            head, tail = words(spec)
            last = spec
        payload = <bytes?>content
        job_id = <bytes?>state.job_id
        raw_id = PyBytes_AS_STRING(job_id)
        attempt, fencing = state.attempt, state.fencing
        fire_at_ms, key_at_ms = state.fire_at_ms, state.key_at_ms
        out.add('{"job_id":"job_', 15)
        out.add_hex(raw_id, PyBytes_GET_SIZE(job_id))
        out.add('","queue":"', 11)
        out.add_text(<str?>state.queue)
        out.add('","attempt":', 12)
        out.add_int(attempt)
        out.add(',"lease_token":"att_', 20)
        out.add_hex(raw_id, PyBytes_GET_SIZE(job_id))
        for shift in range(4):
            number[shift] = <unsigned char>(attempt >> (24 - 8 * shift))
        for shift in range(8):
            number[4 + shift] = <unsigned char>(fencing >> (56 - 8 * shift))
        out.add_hex(<const char*>number, 12)
        out.add('","lease_expires_at":"', 22)
        out.add_instant(state.lease_expires_at_ms)
        out.add('","idempotency_key":"job_', 25)
        out.add_hex(raw_id, PyBytes_GET_SIZE(job_id))
        out.add("@", 1)
        out.add_instant(key_at_ms if key_at_ms else fire_at_ms)
        out.add('","fencing_token":', 18)
        out.add_int(<int64_t>fencing)
        out.add(",", 1)
        if PyBytes_GET_SIZE(head):
            out.add_bytes(head)
        else:
            out.add('"payload":', 10)
            out.add_bytes(payload)
        out.add(',"run_at":"', 11)
        out.add_instant(state.run_at_ms)
        out.add('","fire_at":"', 13)
        out.add_instant(fire_at_ms)
        out.add('",', 2)
        out.add_bytes(tail)
    out.add("]}", 2)
    return PyBytes_FromStringAndSize(out.data, out.size)
