// unpack_codes, pack_codes, decode_codes: check the arguments, let go of the GIL, call the core.
#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "bindings/bindings.h"
#include "bindings/launch.h"
#include "bindings/tensor_view.h"
#include "ops/formats/code_stream.h"

namespace kbitq {
namespace {

using Optional = std::optional<py::object>;

CodeOrder order_named(const std::string& name) {
    if (name == "stream") return CodeOrder::stream;
    if (name == "high_first") return CodeOrder::high_first;
    if (name == "words") return CodeOrder::words;
    if (name == "bytes") return CodeOrder::bytes;
    throw py::value_error("order: must be stream, high_first, words or bytes, got '" + name + "'");
}

constexpr int64_t kMostGroup = int64_t{1} << 60;  // columns; far from where sums of them overflow

int64_t row_bytes(const CodeRows& rows) {
    if (rows.order == CodeOrder::words) return 4 * rows.cols;
    if (rows.order == CodeOrder::bytes) return rows.cols;
    return (rows.cols * rows.bits + 7) / 8;
}

void check_bits(int bits) {
    if (bits < 1 || bits > kMaxCodeBits) throw py::value_error("bits: must be from 1 to 8");
}

// The rows of codes that the arguments describe, each inside its bytes.
CodeRows code_rows(const TensorView& data, TensorView& starts, const Optional& shifts_arg, int64_t cols, int bits,
                   const std::string& order) {
    check_bits(bits);
    starts.is(Element::i64).of_rank(1).on(kCpu);
    CodeRows rows{data.data<uint8_t>(), data.count(), starts.data<int64_t>(), nullptr, starts.size(0), cols, bits,
                  order_named(order)};
    if (rows.order == CodeOrder::high_first && bits != 4) throw py::value_error("order: high_first is of 4 bits");
    const bool fields = rows.order == CodeOrder::words || rows.order == CodeOrder::bytes;
    if (fields != shifts_arg.has_value()) throw py::value_error("shifts: goes with order words or bytes");
    if (fields) {
        TensorView shifts("shifts", *shifts_arg);
        rows.shifts = shifts.is(Element::i32).shaped({rows.rows}).on(kCpu).data<int32_t>();
    }
    const int64_t needed = row_bytes(rows);
    const int most = (rows.order == CodeOrder::words ? 32 : 8) - bits;
    for (int64_t i = 0; i < rows.rows; ++i) {
        if (rows.starts[i] < 0 || rows.starts[i] > rows.nbytes - needed)
            throw py::value_error("starts: a row's codes are not all inside data");
        if (fields && (rows.shifts[i] < 0 || rows.shifts[i] > most))
            throw py::value_error("shifts: a code does not lie inside its field");
    }
    return rows;
}

void unpack_codes(const py::object& data_arg, const py::object& starts_arg, const Optional& shifts,
                  const py::object& out_arg, int bits, const std::string& order, int threads) {
    TensorView data("data", data_arg), starts("starts", starts_arg), out("out", out_arg);
    data.is(Element::u8).of_rank(1).on(kCpu);
    out.is(Element::u8).of_rank(2).on(kCpu);
    UnpackArgs args{code_rows(data, starts, shifts, out.size(1), bits, order), out.data<uint8_t>()};
    out.shaped({args.codes.rows, args.codes.cols});
    check_threads(threads);
    py::gil_scoped_release unlocked;
    unpack_codes_cpu(args, threads);
}

void pack_codes(const py::object& codes_arg, const py::object& out_arg, int bits, int threads) {
    TensorView codes("codes", codes_arg), out("out", out_arg);
    check_bits(bits);
    codes.is(Element::u8).of_rank(2).on(kCpu);
    out.is(Element::u8).of_rank(2).on(kCpu);
    if (out.size(0) != codes.size(0) || out.size(1) < (codes.size(1) * bits + 7) / 8)
        throw py::value_error("out: has no room for the rows of codes");
    const PackArgs args{codes.data<uint8_t>(), codes.size(0), codes.size(1), bits, out.data<uint8_t>(), out.size(1)};
    check_threads(threads);
    py::gil_scoped_release unlocked;
    pack_codes_cpu(args, threads);
}

const float* parameter(const char* name, const Optional& arg, const TensorView& scale) {
    if (!arg) return nullptr;
    return TensorView(name, *arg).is(Element::f32).shaped({scale.size(0), scale.size(1)}).on(kCpu).data<float>();
}

void decode_codes(const py::object& data_arg, const py::object& starts_arg, const Optional& shifts,
                  const Optional& table_arg, const py::object& scale_arg, const Optional& zero, const Optional& bias,
                  const Optional& group_of_arg, int64_t group_size, int64_t phase, const py::object& out_arg, int bits,
                  const std::string& order, bool round_each, int threads) {
    TensorView data("data", data_arg), starts("starts", starts_arg), scale("scale", scale_arg), out("out", out_arg);
    data.is(Element::u8).of_rank(1).on(kCpu);
    out.is_floating().of_rank(2).on(kCpu);
    DecodeCodesArgs args{};
    args.codes = code_rows(data, starts, shifts, out.size(1), bits, order);
    const int64_t rows = args.codes.rows, cols = args.codes.cols;
    out.shaped({rows, cols});
    if (table_arg)
        args.table =
            TensorView("table", *table_arg).is(Element::f32).shaped({int64_t{1} << bits}).on(kCpu).data<float>();
    args.groups = scale.of_rank(2).size(1);
    args.stride = scale.size(0) == 1 ? 0 : args.groups;
    args.scale = scale.is(Element::f32).shaped({args.stride ? rows : 1, args.groups}).on(kCpu).data<float>();
    args.zero = parameter("zero", zero, scale);
    args.bias = parameter("bias", bias, scale);
    if (group_of_arg) {
        TensorView group_of("group_of", *group_of_arg);
        args.group_of = group_of.is(Element::i32).shaped({cols}).on(kCpu).data<int32_t>();
        for (int64_t c = 0; c < cols; ++c) {
            if (args.group_of[c] < 0 || args.group_of[c] >= args.groups)
                throw py::value_error("group_of: names a group that there is not");
        }
    } else if (group_size < 1 || group_size > kMostGroup || phase < 0 || phase >= group_size ||
               (cols && (cols + phase - 1) / group_size >= args.groups)) {
        throw py::value_error("group_size: its groups do not cover the columns");
    }
    args.group_size = group_size;
    args.phase = phase;
    args.round_each = round_each;
    args.out = out.data<void>();
    args.dtype = out.dtype();
    check_threads(threads);
    py::gil_scoped_release unlocked;
    decode_codes_cpu(args, threads);
}

}  // namespace

void bind_formats(py::module_& m) {
    using py::arg;
    m.def("unpack_codes", &unpack_codes, arg("data"), arg("starts"), arg("shifts").none(true), arg("out"), arg("bits"),
          arg("order") = "stream", arg("threads") = 1, "Fill out [rows, cols] with the codes that begin at starts.");
    m.def("pack_codes", &pack_codes, arg("codes"), arg("out"), arg("bits"), arg("threads") = 1,
          "Fill the rows of out with dense streams of codes.");
    m.def("decode_codes", &decode_codes, arg("data"), arg("starts"), arg("shifts").none(true), arg("table").none(true),
          arg("scale"), arg("zero").none(true), arg("bias").none(true), arg("group_of").none(true), arg("group_size"),
          arg("phase"), arg("out"), arg("bits"), arg("order") = "stream", arg("round_each") = false, arg("threads") = 1,
          "Fill out [rows, cols] with (table[code] - zero) * scale + bias, by group of columns.");
}

}  // namespace kbitq
