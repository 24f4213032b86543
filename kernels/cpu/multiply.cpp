// Matrix products with packed weights: register tiles of R rows by P panels.
//
// A tile size changes how often a weight is loaded, never the operations of a result: each is one chain of sums over
// the inputs (or over groups of 32 whose integer sums are exact), so it has the same bits alone and in any batch.
#include <algorithm>
#include <cstring>

#include "vectors.h"
#include "weight.h"

namespace tokenmill {

namespace {

struct Rows {
    const Buffer& x;
    int64_t first;
    int64_t groups;  // of 32 inputs in a row

    const float* values(int r) const { return x.values + (first + r) * x.width; }
    const int16_t* codes16() const { return x.codes16 + first * x.width; }
    const float* scales16() const { return x.scales16 + first * groups * 2; }
    const int8_t* codes8() const { return x.codes8 + first * x.width; }
    const float* scales8() const { return x.scales8 + first * groups * 2; }
    const Outlier* outliers(int r) const { return x.outliers + (first + r) * kOutliers; }
};

// --- float32 and bfloat16 weights, float32 activations ------------------------------------------------------------

struct Float32Panel {
    using Element = float;
    static void load(const float* p, Floats& low, Floats& high) {
        low = load_floats(p);
        high = load_floats(p + kLanes);
    }
};

// Widened to float32, not multiplied as pairs by AVX-512's own instruction: that takes bfloat16 activations too, and these
// are float32, here as on every other instruction set.
struct Bfloat16Panel {
    using Element = bf16;
    static void load(const bf16* p, Floats& low, Floats& high) {
#if TOKENMILL_X86
        const Integers pairs = load_integers(p);
        low = lower_bf16(pairs);
        high = upper_bf16(pairs);
#else
        for (int i = 0; i < kLanes; i++) {
            low.v[i] = bf16_to_float(p[2 * i]);
            high.v[i] = bf16_to_float(p[2 * i + 1]);
        }
#endif
    }
};

template <class Panel, int R, int P>
void multiply_float(const Weight& weight, const Rows& rows, int64_t panel, float* out, int64_t stride) {
    const typename Panel::Element* w[P];
    for (int p = 0; p < P; p++) w[p] = reinterpret_cast<const typename Panel::Element*>(weight.panel(panel + p));
    const float* x[R];
    for (int r = 0; r < R; r++) x[r] = rows.values(r);
    Floats sums[R][P][2];
    for (auto& row : sums) {
        for (auto& pair : row) pair[0] = pair[1] = zero_floats();
    }
    for (int64_t i = 0; i < weight.k; i++) {
        for (int p = 0; p < P; p++) {
            Floats low, high;
            Panel::load(w[p] + i * kFloatColumns, low, high);
            for (int r = 0; r < R; r++) {
                const Floats value = set_floats(x[r][i]);
                sums[r][p][0] = fma(low, value, sums[r][p][0]);
                sums[r][p][1] = fma(high, value, sums[r][p][1]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int p = 0; p < P; p++) {
            store_floats(out + r * stride + p * kFloatColumns, sums[r][p][0]);
            store_floats(out + r * stride + p * kFloatColumns + kLanes, sums[r][p][1]);
        }
    }
}

// --- int8 weights, int16 activations ------------------------------------------------------------------------------
//
// The loops over j stay loops: unrolled, compilers move all loads to the front and run out of registers.

#if TOKENMILL_X86

// How many groups ahead memory is asked for: those of the next panels, or further where little is done with each.
// Measured: the hardware alone reads int4 weights at half the speed that this gets.
inline int64_t groups_ahead(const Weight& weight, const Rows& rows, int r, int p) {
    constexpr int64_t kBytes = 24 << 10;
    const int64_t panels = r > 1 ? p : std::max<int64_t>(p, kBytes / weight.panel_bytes());
    return rows.groups * panels;
}

inline Integers broadcast4(const void* p) {
    int32_t bytes;
    std::memcpy(&bytes, p, 4);
    return set_integers(bytes);
}

// Sums of a group fit 32 bits: 32 * 128 * 32767 is 1.3e8.
template <int R, int P>
void multiply_int8(const Weight& weight, const Rows& rows, int64_t panel, float* out, int64_t stride) {
    const Int8Group* w[P];
    for (int p = 0; p < P; p++) w[p] = reinterpret_cast<const Int8Group*>(weight.panel(panel + p));
    const int16_t* codes = rows.codes16();
    const int64_t ahead = groups_ahead(weight, rows, R, P);
    const float* scales = rows.scales16();
    const int64_t width = rows.groups * kGroup;
    Floats totals[R][P];
    for (auto& row : totals) {
        for (auto& total : row) total = zero_floats();
    }
    for (int64_t g = 0; g < rows.groups; g++) {
        Integers sums[R][P];
        for (auto& row : sums) {
            for (auto& sum : row) sum = zero_integers();
        }
        for (int p = 0; p < P; p++) prefetch(&w[p][g] + ahead, sizeof(Int8Group));
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) {
            const int16_t* x = codes + g * kGroup + 4 * j;
            // Of each column's four codes: first those of inputs 0 and 2, then those of inputs 1 and 3.
            Integers half[P];
            for (int p = 0; p < P; p++) half[p] = first_bytes(load_integers(w[p][g].codes[j]));
            for (int r = 0; r < R; r++) {
                const Integers two = broadcast4(x + r * width);
                for (int p = 0; p < P; p++) sums[r][p] = add_products(sums[r][p], half[p], two);
                asm volatile("" : : : "memory");
            }
            for (int p = 0; p < P; p++) half[p] = second_bytes(load_integers(w[p][g].codes[j]));
            for (int r = 0; r < R; r++) {
                const Integers two = broadcast4(x + r * width + 2);
                for (int p = 0; p < P; p++) sums[r][p] = add_products(sums[r][p], half[p], two);
                asm volatile("" : : : "memory");
            }
        }
        for (int p = 0; p < P; p++) {
            const Floats scale = load_floats(w[p][g].scale);
            for (int r = 0; r < R; r++) {
                const Floats whole = to_floats(sums[r][p]);
                totals[r][p] = fma(whole, scale * set_floats(scales[2 * (r * rows.groups + g)]), totals[r][p]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int p = 0; p < P; p++) store_floats(out + r * stride + p * kLanes, totals[r][p]);
    }
}

#else

template <int R, int P>
void multiply_int8(const Weight& weight, const Rows& rows, int64_t panel, float* out, int64_t stride) {
    constexpr int order[4] = {0, 2, 1, 3};
    for (int p = 0; p < P; p++) {
        const auto* w = reinterpret_cast<const Int8Group*>(weight.panel(panel + p));
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < kLanes; c++) {
                float total = 0.0f;
                for (int64_t g = 0; g < rows.groups; g++) {
                    const int16_t* x = rows.codes16() + (r * rows.groups + g) * kGroup;
                    int32_t sum = 0;
                    for (int i = 0; i < kGroup; i++) sum += w[g].codes[i / 4][4 * c + i % 4] * x[i / 4 * 4 + order[i % 4]];
                    const float scale = half_to_float(w[g].scale[c].bits) * rows.scales16()[2 * (r * rows.groups + g)];
                    total = static_cast<float>(sum) * scale + total;
                }
                out[r * stride + p * kLanes + c] = total;
            }
        }
    }
}

#endif

// --- int4 weights, int8 activations -------------------------------------------------------------------------------
//
// One instruction multiplies twice as many activations of 8 bits as of 16. What that would cost in exactness is mostly due
// to single large values, which stretch the scale of all the others in their group: the largest of a row are therefore
// multiplied as float32 instead. (Only by code and scale: the minimum of a group meets the sum of all its inputs, these
// included.)

#if TOKENMILL_X86

// The products of four inputs of each column.
template <int R, int P>
inline void add_four(const Integers* codes, const int8_t* x, int64_t width, Int4Sums (*sums)[P]) {
    for (int r = 0; r < R; r++) {
        const Integers inputs = broadcast4(x + r * width);
        for (int p = 0; p < P; p++) sums[r][p].add(codes[p], inputs);
        asm volatile("" : : : "memory");
    }
}

// Column values of one input, without the minimum of their groups.
inline Floats int4_column(const Int4Group& group, int row, int shift) {
    const Floats whole = to_floats(codes_at(load_integers(group.codes[row]), shift));
    return whole * load_floats(group.scale);
}

template <int R, int P>
void multiply_int4(const Weight& weight, const Rows& rows, int64_t panel, float* out, int64_t stride) {
    const Int4Group* w[P];
    for (int p = 0; p < P; p++) w[p] = reinterpret_cast<const Int4Group*>(weight.panel(panel + p));
    const int8_t* codes = rows.codes8();
    const float* scales = rows.scales8();
    const int64_t ahead = groups_ahead(weight, rows, R, P);
    const int64_t width = rows.groups * kGroup;
    Floats totals[R][P];
    for (auto& row : totals) {
        for (auto& total : row) total = zero_floats();
    }
    for (int64_t g = 0; g < rows.groups; g++) {
        Int4Sums sums[R][P];
        for (int p = 0; p < P; p++) prefetch(&w[p][g] + ahead, sizeof(Int4Group));
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const int8_t* x = codes + g * kGroup + 4 * j;
            Integers four[P];
            for (int p = 0; p < P; p++) four[p] = lower_codes(load_integers(w[p][g].codes[j]));
            add_four<R, P>(four, x, width, sums);
            for (int p = 0; p < P; p++) four[p] = upper_codes(load_integers(w[p][g].codes[j]));
            add_four<R, P>(four, x + 16, width, sums);
        }
        Floats scale[P], minimum[P];
        for (int p = 0; p < P; p++) {
            scale[p] = load_floats(w[p][g].scale);
            minimum[p] = load_floats(w[p][g].minimum);
        }
        for (int r = 0; r < R; r++) {
            const float* x = scales + 2 * (r * rows.groups + g);
            for (int p = 0; p < P; p++) {
                totals[r][p] = fma(sums[r][p].whole(), scale[p] * set_floats(x[0]), totals[r][p]);
                totals[r][p] = fma(minimum[p], set_floats(x[1]), totals[r][p]);
            }
        }
    }
    for (int r = 0; r < R; r++) {
        for (int o = 0; o < kOutliers; o++) {
            const Outlier& outlier = rows.outliers(r)[o];
            for (int p = 0; p < P; p++) {
                const Floats column = int4_column(w[p][outlier.group], outlier.row, outlier.shift);
                totals[r][p] = fma(column, set_floats(outlier.value), totals[r][p]);
            }
        }
        for (int p = 0; p < P; p++) store_floats(out + r * stride + p * kLanes, totals[r][p]);
    }
}

#else

inline int int4_code(const Int4Group& group, int c, int input) {
    const int j = input / 4;
    const uint8_t both = group.codes[j % 4][4 * c + input % 4];
    return j < 4 ? both & 15 : both >> 4;
}

template <int R, int P>
void multiply_int4(const Weight& weight, const Rows& rows, int64_t panel, float* out, int64_t stride) {
    for (int p = 0; p < P; p++) {
        const auto* w = reinterpret_cast<const Int4Group*>(weight.panel(panel + p));
        for (int r = 0; r < R; r++) {
            for (int c = 0; c < kLanes; c++) {
                float total = 0.0f;
                for (int64_t g = 0; g < rows.groups; g++) {
                    const int8_t* x = rows.codes8() + (r * rows.groups + g) * kGroup;
                    const float* scales = rows.scales8() + 2 * (r * rows.groups + g);
                    int32_t sum = 0;
                    for (int i = 0; i < kGroup; i++) sum += int4_code(w[g], c, i) * x[i];
                    total = static_cast<float>(sum) * (half_to_float(w[g].scale[c].bits) * scales[0]) + total;
                    total = half_to_float(w[g].minimum[c].bits) * scales[1] + total;
                }
                for (int o = 0; o < kOutliers; o++) {
                    const Outlier& outlier = rows.outliers(r)[o];
                    const Int4Group& group = w[outlier.group];
                    const uint8_t both = group.codes[outlier.row][4 * c + outlier.shift / 8];
                    const auto code = static_cast<float>(both >> outlier.shift % 8 & 15);
                    total = code * half_to_float(group.scale[c].bits) * outlier.value + total;
                }
                out[r * stride + p * kLanes + c] = total;
            }
        }
    }
}

#endif

// --- tiles --------------------------------------------------------------------------------------------------------

using Kernel = void (*)(const Weight&, const Rows&, int64_t panel, float* out, int64_t stride);

// Register tiles for 1, 2, ... rows: `wide` covers `panels` panels at once, `narrow` one.
struct Kernels {
    int rows;
    int panels;
    Kernel wide;
    Kernel narrow;
};

// Panels of a product task, which has 32 columns.
constexpr int kCodePanels = 32 / kLanes;
constexpr int kFloatPanels = 32 / kFloatColumns;

// By the number of rows, from most to fewest; a tile takes the first that fits. AVX-512 has registers for the sums of eight
// rows. (By llvm-mca's model of Ice Lake twelve gain nothing, and four cost int8 a tenth; no such CPU was at hand.)
template <class Panel>
const Kernels* float_kernels() {
    static constexpr Kernels table[] = {
#if defined(TOKENMILL_ISA_AVX512)
        {8, 1, multiply_float<Panel, 8, 1>, multiply_float<Panel, 8, 1>},
#endif
        {6, 1, multiply_float<Panel, 6, 1>, multiply_float<Panel, 6, 1>},
        {4, 1, multiply_float<Panel, 4, 1>, multiply_float<Panel, 4, 1>},
        {3, kFloatPanels, multiply_float<Panel, 3, kFloatPanels>, multiply_float<Panel, 3, 1>},
        {2, kFloatPanels, multiply_float<Panel, 2, kFloatPanels>, multiply_float<Panel, 2, 1>},
        {1, kFloatPanels, multiply_float<Panel, 1, kFloatPanels>, multiply_float<Panel, 1, 1>},
    };
    return table;
}

const Kernels* int8_kernels() {
    static constexpr Kernels table[] = {
#if defined(TOKENMILL_ISA_AVX512)
        {8, 2, multiply_int8<8, 2>, multiply_int8<8, 1>},
#endif
        {4, 2, multiply_int8<4, 2>, multiply_int8<4, 1>},
        {3, 2, multiply_int8<3, 2>, multiply_int8<3, 1>},
        {2, 2, multiply_int8<2, 2>, multiply_int8<2, 1>},
        {1, kCodePanels, multiply_int8<1, kCodePanels>, multiply_int8<1, 1>},
        {1, 2, multiply_int8<1, 2>, multiply_int8<1, 1>},
    };
    return table;
}

const Kernels* int4_kernels() {
    static constexpr Kernels table[] = {
#if defined(TOKENMILL_ISA_AVX512)
        {8, 2, multiply_int4<8, 2>, multiply_int4<8, 1>},
#endif
        {4, 2, multiply_int4<4, 2>, multiply_int4<4, 1>},
        {3, 2, multiply_int4<3, 2>, multiply_int4<3, 1>},
        {2, 2, multiply_int4<2, 2>, multiply_int4<2, 1>},
        {1, kCodePanels, multiply_int4<1, kCodePanels>, multiply_int4<1, 1>},
        {1, 2, multiply_int4<1, 2>, multiply_int4<1, 1>},
    };
    return table;
}

const Kernels* kernels_of(Kind kind) {
    switch (kind) {
        case Kind::kFloat32: return float_kernels<Float32Panel>();
        case Kind::kBfloat16: return float_kernels<Bfloat16Panel>();
        case Kind::kInt4: return int4_kernels();
        case Kind::kInt8: return int8_kernels();
    }
    return nullptr;
}

}  // namespace

void multiply_tile(const Weight& weight, const Buffer& x, int64_t row0, int rows, int64_t col0, int cols, float* tile,
                   int64_t stride) {
    const int width = panel_width(weight.kind);
    const int64_t first = col0 / width, last = std::min((col0 + cols + width - 1) / width, weight.panels());
    const int64_t groups = x.width / kGroup;
    const Kernels* all = kernels_of(weight.kind);
    for (int64_t panel = first; panel < last;) {
        // Panels outside, rows inside: the panel stays in the first-level cache.
        const int64_t left = last - panel;
        int64_t step = all->panels;
        int r = 0;
        while (r < rows) {
            const Kernels* fit = all;
            while (fit->rows > rows - r) fit++;
            if (r == 0) step = left >= fit->panels ? fit->panels : 1;
            else if (fit->rows == 1 && fit->panels != step && fit->panels > 2) fit++;
            const Rows some{x, row0 + r, groups};
            float* out = tile + static_cast<int64_t>(r) * stride + (panel - first) * width;
            if (step == fit->panels) {
                fit->wide(weight, some, panel, out, stride);
            } else {
                for (int64_t p = 0; p < step; p++) fit->narrow(weight, some, panel + p, out + p * width, stride);
            }
            r += fit->rows;
        }
        panel += step;
    }
}

}  // namespace tokenmill
