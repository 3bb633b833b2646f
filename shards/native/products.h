/* Products of one row of activations with matrices as they lie in memory. Each thread reads a part that is contiguous
 * and asks for it in time, so that memory delivers as fast as it can.
 *
 * Sums are in float, those of whole numbers in 32 bits as in `int8_products.py`. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include <immintrin.h>
#define HAS_VECTORS_OF_BYTES 1
#else
#define HAS_VECTORS_OF_BYTES 0
#endif
#if HAS_VECTORS_OF_BYTES && defined(__AVX512BF16__)
#define HAS_PRODUCTS_OF_HALVES 1
#else
#define HAS_PRODUCTS_OF_HALVES 0
#endif

#define UNIT 64    /* outputs that are computed together */
#define LANES 16   /* floats in a vector */
#define BLOCK 64   /* numbers of nf4 that share a scale */
#define PANEL 32   /* rows of nf4 that lie together */
#define AHEAD 3072 /* bytes that are asked for before they are needed */
#define LARGEST 32512.0f
#define CENTRE 128
#define CENTRES (CENTRE * 257)

typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t words __attribute__((vector_size(64), aligned(4), may_alias));

enum form { FLOAT_PANELS, HALF_PANELS, BYTE_PANELS, NF4_PANELS, FLOAT_ROWS, HALF_ROWS };

typedef struct {
    const void *numbers; /* as `form` says */
    const void *scales;  /* of bytes float[rows], of nf4 bfloat16[columns / BLOCK][rows] */
    const float *bias;   /* [rows], or none */
    int64_t rows, columns;
    int64_t form;
} matrix;

typedef struct {
    float *numbers;         /* [columns] */
    float *even, *odd;      /* the same, apart */
    uint8_t *lower, *higher; /* bytes of whole numbers, CENTRE more than they mean; for nf4 bfloat16 over both */
    float step;             /* what one of those is worth */
} input;

static inline float half_to_float(uint16_t half) {
    union { uint32_t word; float number; } both = {(uint32_t)half << 16};
    return both.number;
}

static inline uint16_t float_to_half(float number) {
    union { float number; uint32_t word; } both = {number};
    if (number != number) return 0x7fc0;
    return (uint16_t)((both.word + 0x7fff + ((both.word >> 16) & 1)) >> 16);
}

static void widen(const void *from, int halves, int64_t count, float *to) {
    if (!halves) {
        memcpy(to, from, (size_t)count * sizeof(float));
        return;
    }
    const uint16_t *numbers = from;
    for (int64_t i = 0; i < count; i++) to[i] = half_to_float(numbers[i]);
}

static void narrow(const float *from, int halves, int64_t count, void *to) {
    if (!halves) {
        memcpy(to, from, (size_t)count * sizeof(float));
        return;
    }
    uint16_t *numbers = to;
    for (int64_t i = 0; i < count; i++) numbers[i] = float_to_half(from[i]);
}

static inline float sum_of(floats vector) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += vector[i];
    return sum;
}

static inline void ask_for(const void *at, int lines) {
    for (int i = 0; i < lines; i++) __builtin_prefetch((const char *)at + AHEAD + 64 * i);
}

/* [columns][UNIT] */
static void float_panel(const float *weights, const float *x, int64_t columns, float *result) {
    floats left[4] = {0}, right[4] = {0};
    for (int64_t k = 0; k < columns; k += 2, weights += 2 * UNIT) {
        ask_for(weights, 8);
        for (int j = 0; j < 4; j++) left[j] += ((const floats *)weights)[j] * x[k];
        for (int j = 0; j < 4; j++) right[j] += ((const floats *)weights)[4 + j] * x[k + 1];
    }
    for (int j = 0; j < 4; j++) ((floats *)result)[j] = left[j] + right[j];
}

/* [columns / 2][UNIT][2] bfloat16 */
static void half_panel(const int32_t *weights, const float *x, int64_t columns, float *result) {
    floats left[4] = {0}, right[4] = {0};
    for (int64_t k = 0; k < columns; k += 2, weights += UNIT) {
        ask_for(weights, 4);
        for (int j = 0; j < 4; j++) {
            words pairs = ((const words *)weights)[j];
            left[j] += (floats)(pairs << 16) * x[k];
            right[j] += (floats)(pairs & (int32_t)0xffff0000) * x[k + 1];
        }
    }
    for (int j = 0; j < 4; j++) ((floats *)result)[j] = left[j] + right[j];
}

#if HAS_VECTORS_OF_BYTES
/* [columns / 4][UNIT][4] bytes; `minus_sums` are of the rows */
static void byte_panel(const int8_t *weights, const int32_t *minus_sums, const float *scales, const input *in,
                       int64_t columns, float *result) {
    __m512i lower[4], higher[4];
    for (int j = 0; j < 4; j++) lower[j] = higher[j] = _mm512_setzero_si512();
    for (int64_t k = 0; k < columns; k += 4, weights += 4 * UNIT) {
        int32_t low, high;
        memcpy(&low, in->lower + k, 4);
        memcpy(&high, in->higher + k, 4);
        __m512i lows = _mm512_set1_epi32(low), highs = _mm512_set1_epi32(high);
        ask_for(weights, 4);
        for (int j = 0; j < 4; j++) {
            __m512i panel = _mm512_loadu_si512(weights + 64 * j);
            lower[j] = _mm512_dpbusd_epi32(lower[j], lows, panel);
            higher[j] = _mm512_dpbusd_epi32(higher[j], highs, panel);
        }
    }
    for (int j = 0; j < 4; j++) {
        __m512i centre = _mm512_slli_epi32(_mm512_loadu_si512(minus_sums + LANES * j), 7);
        __m512 scale = _mm512_loadu_ps(scales + LANES * j);
        __m512 lows = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(lower[j], centre)), scale);
        __m512 highs = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(higher[j], centre)), scale);
        __m512 both = _mm512_fmadd_ps(highs, _mm512_set1_ps(256.0f), lows);
        _mm512_storeu_ps(result + LANES * j, _mm512_mul_ps(both, _mm512_set1_ps(in->step)));
    }
}

#endif

#if HAS_PRODUCTS_OF_HALVES
/* Dettmers et al., "QLoRA" (2023), appendix E, rounded to bfloat16 as the matrices' numbers are; twice, for of the five
 * bits that choose one the fifth belongs to another number. */
#define NORMAL_HALVES \
    0xbf80, 0xbf32, 0xbf06, 0xbeca, 0xbe92, 0xbe3d, 0xbdba, 0x0000, \
    0x3da3, 0x3e25, 0x3e7c, 0x3ead, 0x3ee2, 0x3f10, 0x3f39, 0x3f80
static const uint16_t NORMAL_FLOATS[32] = {NORMAL_HALVES, NORMAL_HALVES};

static inline __m512 widened(const uint16_t *halves) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)halves));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/* [columns / 2][PANEL] bytes as `nf4_products.py` lays them out: of each, the lower four bits are of the upper half of
 * the rows. `x` is bfloat16. */
static void nf4_panel(const uint8_t *weights, const uint16_t *scales, int64_t rows, const uint16_t *x, int64_t columns,
                      float *result) {
    const __m512i table = _mm512_loadu_si512(NORMAL_FLOATS);
    __m512 upper = _mm512_setzero_ps(), lower = _mm512_setzero_ps();
    for (int64_t k = 0; k < columns; k += BLOCK, scales += rows) {
        __m512 uppers[4], lowers[4];
        for (int j = 0; j < 4; j++) uppers[j] = lowers[j] = _mm512_setzero_ps();
        for (int i = 0; i < BLOCK; i += 8, weights += 4 * PANEL) {
            ask_for(weights, 2);
            for (int j = 0; j < 4; j++) {
                __m512i bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(weights + PANEL * j)));
                int32_t pair;
                memcpy(&pair, x + k + i + 2 * j, sizeof pair);
                const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
                const __m512i others = _mm512_srli_epi16(bytes, 4);
                uppers[j] = _mm512_dpbf16_ps(uppers[j], (__m512bh)_mm512_permutexvar_epi16(bytes, table), both);
                lowers[j] = _mm512_dpbf16_ps(lowers[j], (__m512bh)_mm512_permutexvar_epi16(others, table), both);
            }
        }
        __m512 of_upper = _mm512_add_ps(_mm512_add_ps(uppers[0], uppers[1]), _mm512_add_ps(uppers[2], uppers[3]));
        __m512 of_lower = _mm512_add_ps(_mm512_add_ps(lowers[0], lowers[1]), _mm512_add_ps(lowers[2], lowers[3]));
        upper = _mm512_fmadd_ps(of_upper, widened(scales), upper);
        lower = _mm512_fmadd_ps(of_lower, widened(scales + LANES), lower);
    }
    _mm512_storeu_ps(result, upper);
    _mm512_storeu_ps(result + LANES, lower);
}
#endif

static float float_row(const float *weights, const float *x, int64_t columns) {
    floats sums[4] = {0};
    for (int64_t k = 0; k < columns; k += 4 * LANES) {
        ask_for(weights + k, 4);
        for (int j = 0; j < 4; j++) sums[j] += ((const floats *)(weights + k))[j] * ((const floats *)(x + k))[j];
    }
    return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

static float half_row(const int32_t *weights, const input *in, int64_t columns) {
    floats even[2] = {0}, odd[2] = {0};
    for (int64_t k = 0; k < columns / 2; k += 2 * LANES) {
        ask_for(weights + k, 2);
        for (int j = 0; j < 2; j++) {
            words pairs = ((const words *)(weights + k))[j];
            even[j] += (floats)(pairs << 16) * ((const floats *)(in->even + k))[j];
            odd[j] += (floats)(pairs & (int32_t)0xffff0000) * ((const floats *)(in->odd + k))[j];
        }
    }
    return sum_of((even[0] + even[1]) + (odd[0] + odd[1]));
}

/* Fills what matrices of this form need beside in->numbers. */
static void prepare(int64_t form, int64_t columns, input *in) {
    if (form == HALF_ROWS)
        for (int64_t k = 0; k < columns / 2; k++) {
            in->even[k] = in->numbers[2 * k];
            in->odd[k] = in->numbers[2 * k + 1];
        }
    if (form == NF4_PANELS) narrow(in->numbers, 1, columns, in->lower);
    if (form != BYTE_PANELS) return;
    float largest = 0;
    for (int64_t k = 0; k < columns; k++) largest = fmaxf(largest, fabsf(in->numbers[k]));
    in->step = largest / LARGEST;
    float step = fmaxf(in->step, 1.17549435e-38f);
    for (int64_t k = 0; k < columns; k++) {
        uint32_t number = (uint32_t)((int32_t)rintf(in->numbers[k] / step) + CENTRES);
        in->lower[k] = (uint8_t)number;
        in->higher[k] = (uint8_t)(number >> 8);
    }
}

/* Outputs [first, last) of the prepared input times the transposed matrix; both are multiples of UNIT. */
static void multiply(const matrix *m, const input *in, int64_t first, int64_t last, float *result) {
    const int64_t columns = m->columns;
    for (int64_t row = first; row < last; row += UNIT, result += UNIT) {
        const char *numbers = m->numbers;
        switch (m->form) {
        case FLOAT_PANELS:
            float_panel((const float *)(numbers + 4 * row * columns), in->numbers, columns, result);
            break;
        case HALF_PANELS:
            half_panel((const int32_t *)(numbers + 2 * row * columns), in->numbers, columns, result);
            break;
#if HAS_VECTORS_OF_BYTES
        case BYTE_PANELS:
            byte_panel((const int8_t *)(numbers + row * columns), (const int32_t *)(numbers + m->rows * columns) + row,
                       (const float *)m->scales + row, in, columns, result);
            break;
#endif
#if HAS_PRODUCTS_OF_HALVES
        case NF4_PANELS:
            for (int64_t part = row; part < row + UNIT; part += PANEL)
                nf4_panel((const uint8_t *)(numbers + part * columns / 2), (const uint16_t *)m->scales + part, m->rows,
                          (const uint16_t *)in->lower, columns, result + (part - row));
            break;
#endif
        case FLOAT_ROWS:
            for (int64_t i = 0; i < UNIT; i++)
                result[i] = float_row((const float *)(numbers + 4 * (row + i) * columns), in->numbers, columns);
            break;
        case HALF_ROWS:
            for (int64_t i = 0; i < UNIT; i++)
                result[i] = half_row((const int32_t *)(numbers + 2 * (row + i) * columns), in, columns);
            break;
        }
        if (m->bias)
            for (int64_t i = 0; i < UNIT; i++) result[i] += m->bias[row + i];
    }
}

/* Where the part of a thread begins, of so many rows. */
static inline int64_t part_of(int64_t rows, int64_t thread, int64_t threads) {
    return rows / UNIT * thread / threads * UNIT;
}

/* Its parts in the scratch of one thread, which has room for `scratch_floats`. */
static input input_in(float *scratch, int64_t most) {
    uint8_t *bytes = (uint8_t *)(scratch + 2 * most);
    return (input){scratch, scratch + most, scratch + most + most / 2, bytes, bytes + most, 0};
}

static inline int64_t scratch_floats(int64_t most) { return 3 * most; }
