// decode_gguf, linear_gguf: check the arguments, let go of the GIL, call the device's version.
#include "ops/formats/gguf.h"
#include "bindings/bindings.h"
#include "bindings/launch.h"
#include "bindings/tensor_view.h"

namespace kbitq {
namespace {

GgufSizes sizes_of(int type) {
    const GgufSizes sizes = gguf_sizes(type);
    if (!sizes.values) throw py::value_error("type: " + std::to_string(type) + " is not one of ggml's block types");
    return sizes;
}

void check_raw(TensorView& raw, int64_t values, const GgufSizes& sizes) {
    if (values % sizes.values)
        throw py::value_error("raw: rows must be whole blocks of " + std::to_string(sizes.values) + " values");
    raw.is(Element::u8).shaped({values / sizes.values * sizes.bytes});
}

void decode_gguf(const py::object& raw_arg, int type, const py::object& out_arg, int threads, uintptr_t stream) {
    TensorView raw("raw", raw_arg), out("out", out_arg);
    const GgufSizes sizes = sizes_of(type);
    out.is_floating().of_rank(1);
    check_raw(raw, out.count(), sizes);
    raw.on(out.device());
    const GgufDecodeArgs args{raw.data<uint8_t>(), out.count() / sizes.values, type, out.data<void>(), out.dtype()};
    launch<GgufDecodeArgs>(decode_gguf_cpu, KBITQ_CUDA_OP(decode_gguf_cuda), args, out.device(), threads, stream);
}

void linear_gguf(const py::object& x_arg, const py::object& raw_arg, int type, const py::object& out_arg, int threads,
                 uintptr_t stream) {
    TensorView x("x", x_arg), raw("raw", raw_arg), out("out", out_arg);
    const GgufSizes sizes = sizes_of(type);
    x.is_floating().of_rank(3);
    const int64_t experts = x.size(0), batch = x.size(1), cols = x.size(2);
    out.is_floating().of_rank(3).on(x.device());
    out.shaped({experts, batch, out.size(2)});
    if (out.dtype() != x.dtype()) throw py::value_error("out: must have the dtype of x");
    if (cols % sizes.values)
        throw py::value_error("x: its features must be a multiple of " + std::to_string(sizes.values));
    check_raw(raw, experts * out.size(2) * cols, sizes);
    raw.on(x.device());
    const GgufLinearArgs args{raw.data<uint8_t>(), type,  experts,  out.size(2), cols, x.data<void>(),
                              out.data<void>(),    batch, x.dtype()};
    launch<GgufLinearArgs>(linear_gguf_cpu, KBITQ_CUDA_OP(linear_gguf_cuda), args, x.device(), threads, stream);
}

}  // namespace

void bind_gguf(py::module_& m) {
    using py::arg;
    m.def("decode_gguf", &decode_gguf, arg("raw"), arg("type"), arg("out"), arg("threads") = 1, arg("stream") = 0,
          "Fill out [n] with the values of ggml's blocks.");
    m.def("linear_gguf", &linear_gguf, arg("x"), arg("raw"), arg("type"), arg("out"), arg("threads") = 1,
          arg("stream") = 0, "Fill out [experts, batch, rows] with x [experts, batch, cols] times the blocks' rows.");
}

}  // namespace kbitq
