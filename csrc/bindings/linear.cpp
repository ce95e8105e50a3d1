// linear: check the arguments, let go of the GIL, call the core.
#include <pybind11/stl.h>

#include <optional>

#include "bindings/bindings.h"
#include "bindings/tensor_view.h"
#include "ops/linear/linear.h"

namespace kbitq {
namespace {

void linear(const py::object& x_arg, const py::object& packed_arg, const py::object& absmax_arg,
            const py::object& codebook_arg, const std::optional<py::object>& bias_arg, const py::object& out_arg,
            int threads) {
    TensorView x("x", x_arg), packed("packed", packed_arg), absmax("absmax", absmax_arg),
        codebook("codebook", codebook_arg), y("out", out_arg);
    x.is_floating().of_rank(2).on(kCpu);
    packed.is(Element::i32).of_rank(2).on(kCpu);
    codebook.is(Element::f32).of_rank(2).on(kCpu);
    LinearArgs args{};
    args.x = x.data<void>();
    args.dtype = static_cast<DType>(x.dtype_index());
    args.batch = x.size(0);
    args.in = x.size(1);
    args.out = packed.size(0);
    args.groups = codebook.size(0);
    args.k = bits_of(codebook, 1);
    if (args.groups < 1 || args.out % args.groups)
        throw py::value_error("codebook: its groups must divide the rows of packed");
    const int64_t nblk = blocks_per_row(args.in);
    packed.shaped({args.out, nblk * args.k});
    absmax.is(Element::u8).shaped({args.out, nblk}).on(kCpu);
    y.is(x.element()).shaped({args.batch, args.out}).on(kCpu);
    if (bias_arg) args.bias = TensorView("bias", *bias_arg).is(x.element()).shaped({args.out}).on(kCpu).data<void>();
    args.packed = packed.data<int32_t>();
    args.absmax = absmax.data<uint8_t>();
    args.codebook = codebook.data<float>();
    args.y = y.data<void>();
    if (threads < 1) throw py::value_error("threads: must be at least 1");
    py::gil_scoped_release unlocked;
    linear_cpu(args, threads);
}

}  // namespace

void bind_linear(py::module_& m) {
    using py::arg;
    m.def("linear", &linear, arg("x"), arg("packed"), arg("absmax"), arg("codebook"), arg("bias").none(true),
          arg("out"), arg("threads") = 1, "out [M, rows] = x [M, cols] W^T + bias on the CPU; codebook [groups, 2^K].");
}

}  // namespace kbitq
