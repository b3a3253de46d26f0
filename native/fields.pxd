# Fields of a slotted object by their place in it: 1 ns where an attribute look-up is 25.
#
# A class with slots tells each slot's place in its member descriptor, `PyMemberDef.offset` of CPython's C API; every msgspec.Struct
# has them. `place_of` finds it once, at the first use of a class, and refuses whatever is not such a slot, so that a struct made
# in another way is an error there and not a wrong read later. A frozen struct may be written only while nobody else knows it: to a
# copy that was made in the same function.

from cpython.object cimport PyObject

cdef extern from *:
    """
    #include <structmember.h>
    static Py_ssize_t field_place(PyObject *descriptor) {
        if (!Py_IS_TYPE(descriptor, &PyMemberDescr_Type)) return -1;
        PyMemberDef *member = ((PyMemberDescrObject *)descriptor)->d_member;
        return member->type == T_OBJECT_EX ? member->offset : -1;
    }
    static inline PyObject *field_get(PyObject *object, Py_ssize_t place) {
        return *(PyObject **)((char *)object + place);
    }
    static inline void field_set(PyObject *object, Py_ssize_t place, PyObject *value) {
        PyObject **slot = (PyObject **)((char *)object + place), *before = *slot;
        Py_INCREF(value);
        *slot = value;
        Py_XDECREF(before);
    }
    """
    Py_ssize_t field_place(object descriptor)
    PyObject* field_get(object made, Py_ssize_t place) noexcept
    void field_set(object made, Py_ssize_t place, object value)


cdef inline Py_ssize_t place_of(kind, str name) except -1:
    cdef Py_ssize_t place = field_place(getattr(kind, name))
    if place < 0:
        raise TypeError(f"{kind.__name__}.{name} is no slot")
    return place


cdef inline object field(object made, Py_ssize_t place):
    """A field; AttributeError-free, for fields of a struct are always set."""
    return <object>field_get(made, place)
