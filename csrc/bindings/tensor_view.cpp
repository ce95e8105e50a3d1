#include "bindings/tensor_view.h"

#include <array>

#include "format/dtype.h"

namespace kbitq {
namespace {

// In the order of Element; torch spells a dtype "torch." and the name.
constexpr std::array<const char*, 7> kNames = {ElementType<DType::f32>::kName,
                                               ElementType<DType::bf16>::kName,
                                               ElementType<DType::f16>::kName,
                                               "float64",
                                               "int32",
                                               "int64",
                                               "uint8"};

const char* element_name(Element e) { return e == Element::other ? "another type" : kNames[static_cast<size_t>(e)]; }

// dtypes are singletons that live as long as torch: the first sight of each is remembered by address.
Element element_of(py::handle dtype) {
    static std::array<PyObject*, kNames.size()> seen{};
    for (size_t i = 0; i < seen.size(); ++i) {
        if (seen[i] == dtype.ptr()) return static_cast<Element>(i);
    }
    const std::string spelled = py::str(dtype);
    for (size_t i = 0; i < kNames.size(); ++i) {
        if (spelled == std::string("torch.") + kNames[i]) {
            seen[i] = dtype.ptr();
            return static_cast<Element>(i);
        }
    }
    return Element::other;
}

// Method and attribute names, made once.
struct Names {
    PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
    PyObject* dtype = PyUnicode_InternFromString("dtype");
    PyObject* shape = PyUnicode_InternFromString("shape");
    PyObject* get_device = PyUnicode_InternFromString("get_device");
    PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
};

const Names& names() {
    static const Names n;
    return n;
}

py::object call(py::handle object, PyObject* method) {
    PyObject* result = PyObject_CallMethodNoArgs(object.ptr(), method);
    if (!result) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
}

py::object attribute(py::handle object, PyObject* name) {
    PyObject* result = PyObject_GetAttr(object.ptr(), name);
    if (!result) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(result);
}

}  // namespace

TensorView::TensorView(const char* name, py::handle tensor) : name_(name) {
    const Names& n = names();
    if (!PyObject_HasAttr(tensor.ptr(), n.data_ptr)) fail("a tensor is needed");
    element_ = element_of(attribute(tensor, n.dtype));
    const py::object shape = attribute(tensor, n.shape);
    if (!PyTuple_Check(shape.ptr())) fail("its shape is not a tuple");
    rank_ = static_cast<size_t>(PyTuple_GET_SIZE(shape.ptr()));
    if (rank_ > kMaxRank) fail("has more than 8 dimensions");
    for (size_t d = 0; d < rank_; ++d)
        shape_[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), static_cast<Py_ssize_t>(d)));
    if (PyErr_Occurred()) throw py::error_already_set();
    if (call(tensor, n.is_contiguous).ptr() != Py_True) fail("must be contiguous");
    device_ = static_cast<int>(PyLong_AsLong(call(tensor, n.get_device).ptr()));
    pointer_ = static_cast<uintptr_t>(PyLong_AsUnsignedLongLong(call(tensor, n.data_ptr).ptr()));
    if (PyErr_Occurred()) throw py::error_already_set();
}

TensorView& TensorView::is(Element element) {
    if (element_ != element) fail(std::string("must be ") + element_name(element) + ", got " + element_name(element_));
    return *this;
}

TensorView& TensorView::is_floating() {
    if (element_ != Element::f32 && element_ != Element::bf16 && element_ != Element::f16) {
        fail(std::string("must be float32, bfloat16 or float16, got ") + element_name(element_));
    }
    return *this;
}

TensorView& TensorView::of_rank(size_t rank) {
    if (rank_ != rank) fail("must have " + std::to_string(rank) + " dimensions, got " + std::to_string(rank_));
    return *this;
}

TensorView& TensorView::shaped(std::initializer_list<int64_t> shape) {
    of_rank(shape.size());
    size_t d = 0;
    for (int64_t size : shape) {
        if (shape_[d] != size) {
            fail("has size " + std::to_string(shape_[d]) + " in dimension " + std::to_string(d) + ", needs " +
                 std::to_string(size));
        }
        ++d;
    }
    return *this;
}

TensorView& TensorView::on(int device) {
    if (device_ != device) {
        const auto place = [](int index) {
            return index == kCpu ? std::string("the CPU") : "cuda:" + std::to_string(index);
        };
        fail("is on " + place(device_) + ", the other arguments are on " + place(device));
    }
    return *this;
}

DType TensorView::dtype() const {
    static_assert(static_cast<int>(Element::f32) == static_cast<int>(DType::f32) &&
                  static_cast<int>(Element::bf16) == static_cast<int>(DType::bf16) &&
                  static_cast<int>(Element::f16) == static_cast<int>(DType::f16));
    return static_cast<DType>(element_);
}

int64_t TensorView::count() const {
    int64_t n = 1;
    for (size_t d = 0; d < rank_; ++d) n *= shape_[d];
    return n;
}

void TensorView::fail(const std::string& what) const { throw py::value_error(std::string(name_) + ": " + what); }

}  // namespace kbitq
