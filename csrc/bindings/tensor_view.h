// What the core sees of a tensor: pointer, shape, type, device. Read from any object with torch.Tensor's methods, so
// the module links against no version of torch. Each check names the argument that fails it.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "format/dtype.h"

namespace kbitq {

namespace py = pybind11;

enum class Element { f32, bf16, f16, f64, i32, i64, u8, other };

constexpr int kCpu = -1;  // device index of the CPU, as torch.Tensor.get_device has it

class TensorView {
  public:
    TensorView(const char* name, py::handle tensor);

    // Checks, for chaining: view("packed", t).is(Element::i32).shaped({rows, words}).on(device)
    TensorView& is(Element element);
    TensorView& is_floating();  // float32, bfloat16 or float16
    TensorView& shaped(std::initializer_list<int64_t> shape);
    TensorView& of_rank(size_t rank);
    TensorView& on(int device);

    template <typename T>
    T* data() const {
        return reinterpret_cast<T*>(pointer_);
    }
    Element element() const { return element_; }
    DType dtype() const;  // of a floating tensor
    int device() const { return device_; }
    int64_t size(size_t d) const { return shape_[d]; }
    size_t rank() const { return rank_; }
    int64_t count() const;

  private:
    [[noreturn]] void fail(const std::string& what) const;

    static constexpr size_t kMaxRank = 8;
    const char* name_;
    uintptr_t pointer_ = 0;
    int64_t shape_[kMaxRank] = {};
    size_t rank_ = 0;
    Element element_ = Element::other;
    int device_ = kCpu;
};

}  // namespace kbitq
