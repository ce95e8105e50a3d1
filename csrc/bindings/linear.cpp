// linear: check the arguments, let go of the GIL, call the core.
#include <pybind11/stl.h>

#include <optional>

#include "bindings/bindings.h"
#include "bindings/launch.h"
#include "bindings/packed_args.h"
#include "bindings/tensor_view.h"
#include "ops/linear/linear.h"

namespace kbitq {
namespace {

void linear(const py::object& x_arg, const py::object& packed_arg, const py::object& absmax_arg,
            const py::object& codebook_arg, const std::optional<py::object>& bias_arg, const py::object& out_arg,
            int threads, const std::string& codec) {
    TensorView x("x", x_arg), packed("packed", packed_arg), absmax("absmax", absmax_arg),
        codebook("codebook", codebook_arg), y("out", out_arg);
    x.is_floating().of_rank(2).on(kCpu);
    packed.of_rank(2);
    const PackedArgs weight =
        PackedArgs(packed.size(0), x.size(1), kCpu, codec).codebook(codebook, 2).planes(packed, absmax);
    LinearArgs args{};
    args.x = x.data<void>();
    args.dtype = x.dtype();
    args.batch = x.size(0);
    args.weight = weight.matrix();
    y.is(x.element()).shaped({x.size(0), packed.size(0)}).on(kCpu);
    args.y = y.data<void>();
    if (bias_arg)
        args.bias = TensorView("bias", *bias_arg).is(x.element()).shaped({packed.size(0)}).on(kCpu).data<void>();
    check_threads(threads);
    py::gil_scoped_release unlocked;
    linear_cpu(args, threads);
}

}  // namespace

void bind_linear(py::module_& m) {
    using py::arg;
    m.def("linear", &linear, arg("x"), arg("packed"), arg("absmax"), arg("codebook"), arg("bias").none(true),
          arg("out"), arg("threads") = 1, arg("codec") = "planes",
          "out [M, rows] = x [M, cols] W^T + bias on the CPU; codebook [groups, levels].");
}

}  // namespace kbitq
