#include "bindings/bindings.h"

PYBIND11_MODULE(_C, m) {
    m.doc() = "The compiled core of kbitq. Use kbitq.ops; this module checks its arguments and nothing more.";
    kbitq::bind_runtime(m);
    kbitq::bind_codec(m);
    kbitq::bind_formats(m);
    kbitq::bind_gguf(m);
    kbitq::bind_linear(m);
    kbitq::bind_tiles(m);
    kbitq::bind_nf4(m);
}
