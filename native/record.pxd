"""The 24-byte timer record, shared by the native modules: `<qQII` of `wheelsched.wheel.TIMER`. Leaves: nothing of ours is imported.

The four fields are naturally aligned, so on a little-endian machine (`setup.py` builds nothing elsewhere) the packed bytes
are the C struct and one memcpy is the whole codec.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef enum:
    TIMER_BYTES = 24


cdef struct Timer:
    int64_t at_ms
    uint64_t id_low
    uint32_t version
    uint32_t word


cdef inline bint same_key(const Timer* left, const Timer* right) noexcept nogil:
    # The id first: it is random, so nearly every mismatch ends here.
    return left.id_low == right.id_low and left.at_ms == right.at_ms and left.version == right.version


cdef inline bint before(const Timer* left, const Timer* right) noexcept nogil:
    """Claim order: (at_ms, id_low), then version and word so that equal keys have one order on every build."""
    if left.at_ms != right.at_ms:
        return left.at_ms < right.at_ms
    if left.id_low != right.id_low:
        return left.id_low < right.id_low
    if left.version != right.version:
        return left.version < right.version
    return left.word < right.word
