/* Steps through a matrix as it lies in memory: what some vectors of it add to the sums of few lines.
 *
 * A matrix is read in steps of some vectors, each of which is multiplied by one word of a line: by a float, by two
 * bfloat16, or by four bytes. A row of activations makes one line, for a matrix of bytes two. Sums are in float, those of
 * whole numbers in 32 bits as in `int8_products.py`. */

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
#define STEPS 32   /* of a panel, in which all lines go through it before the next: a block of nf4, and 8 KB of others */
#define TOGETHER 6 /* lines at most that go through it together: their sums stay in registers */
#define ASKED_STEPS 8 /* for which is asked together */
#define AHEAD 3072 /* bytes that are asked for before they are needed, where no other lines come between */
#define APART 48   /* floats */
#define LARGEST 32512.0f
#define CENTRE 128
#define CENTRES (CENTRE * 257)
#define INLINED static inline __attribute__((always_inline))

/* With half as many registers, half as wide, the sums of several lines have no place in them. */
#ifdef __AVX512F__
#define MOST_ROWS 16
#else
#define MOST_ROWS 1
#endif
#define MOST_LINES (2 * MOST_ROWS + TOGETHER)

typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t words __attribute__((vector_size(64), aligned(4), may_alias));

enum form { FLOAT_PANELS, HALF_PANELS, BYTE_PANELS, NF4_PANELS, FLOAT_ROWS, HALF_ROWS };

/* Where a step's vectors are, of `add_steps`. */
typedef struct {
    const char *weights; /* the first of the steps */
    int64_t first, count; /* which steps, and how many */
    int64_t apart;        /* bytes from one row to the next, of matrices as torch keeps them */
    int64_t ahead;        /* bytes to what is asked for meanwhile */
    int64_t from, to;     /* which bytes of it with each ASKED_STEPS, or which rows */
} stretch;

/* Bytes of a step, and its vectors. */
#define STEP_BYTES(form) ((form) == NF4_PANELS ? PANEL : 256)
#define VECTORS(form) ((form) == NF4_PANELS ? 2 : 4)
#define IN_ROWS(form) ((form) == FLOAT_ROWS || (form) == HALF_ROWS)
/* Columns that a step goes through. */
#define STEP_COLUMNS(form) \
    ((form) == FLOAT_PANELS ? 1 : (form) == BYTE_PANELS ? 4 : (form) == FLOAT_ROWS ? 16 : (form) == HALF_ROWS ? 32 : 2)

#if HAS_PRODUCTS_OF_HALVES
/* Dettmers et al., "QLoRA" (2023), appendix E, rounded to bfloat16 as the matrices' numbers are; twice, for of the five
 * bits that choose one the fifth belongs to another number. */
#define NORMAL_HALVES \
    0xbf80, 0xbf32, 0xbf06, 0xbeca, 0xbe92, 0xbe3d, 0xbdba, 0x0000, \
    0x3da3, 0x3e25, 0x3e7c, 0x3ead, 0x3ee2, 0x3f10, 0x3f39, 0x3f80
static const uint16_t NORMAL_FLOATS[32] = {NORMAL_HALVES, NORMAL_HALVES};

static inline floats widened(const uint16_t *halves) {
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)halves));
    return (floats)_mm512_slli_epi32(wide, 16);
}

/* 32 bytes as `nf4_products.py` lays them out, a pair of columns of a panel: of each, the lower four bits are of the
 * upper half of the rows. */
INLINED void unpack(const char *bytes, __m512i table, floats *halves) {
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)bytes));
    halves[0] = (floats)_mm512_permutexvar_epi16(wide, table);
    halves[1] = (floats)_mm512_permutexvar_epi16(_mm512_srli_epi16(wide, 4), table);
}
#endif

#if HAS_VECTORS_OF_BYTES
/* The word of a step, as often as a vector has room for it. */
INLINED floats every_lane(const char *line, int64_t step) {
    return (floats)_mm512_set1_epi32(((const int32_t *)line)[step]);
}
#endif

/* The sum, and one vector of a step times what belongs to it of a line. By name where the
 * compiler would move its intrinsics' sums from register to register. */
INLINED floats added(const int form, floats sum, floats vector, const char *line, int64_t step) {
    switch (form) {
    case FLOAT_PANELS:
        return sum + vector * ((const float *)line)[step];
    case FLOAT_ROWS:
        return sum + vector * *(const floats *)(line + 64 * step);
#if HAS_PRODUCTS_OF_HALVES
    case HALF_PANELS:
    case NF4_PANELS:
        __asm__("vdpbf16ps %1, %2, %0" : "+v"(sum) : "v"(every_lane(line, step)), "v"(vector));
        return sum;
    case HALF_ROWS: {
        const floats pairs = *(const floats *)(line + 64 * step);
        __asm__("vdpbf16ps %1, %2, %0" : "+v"(sum) : "v"(pairs), "v"(vector));
        return sum;
    }
#else
    case HALF_PANELS: {
        const float *numbers = (const float *)line + 2 * step;
        sum += (floats)((words)vector << 16) * numbers[0];
        return sum + (floats)((words)vector & (int32_t)0xffff0000) * numbers[1];
    }
    case HALF_ROWS: {
        const float *even = (const float *)line + 2 * LANES * step, *odd = even + LANES;
        sum += (floats)((words)vector << 16) * *(const floats *)even;
        return sum + (floats)((words)vector & (int32_t)0xffff0000) * *(const floats *)odd;
    }
#endif
#if HAS_VECTORS_OF_BYTES
    case BYTE_PANELS:
        __asm__("vpdpbusd %1, %2, %0" : "+v"(sum) : "v"(vector), "v"(every_lane(line, step)));
        return sum;
#endif
    }
    return sum;
}

/* The vector, in a register: the compiler would load it again for each line. */
INLINED floats kept(floats vector) {
#ifdef __AVX512F__
    __asm__("" : "+v"(vector));
#endif
    return vector;
}

/* Asks for a part of what lies ahead, before ASKED_STEPS. Behind the end of four rows come the next four. */
INLINED void ask_for(const int form, const stretch *at, const char *weights, int64_t step) {
    if (IN_ROWS(form)) {
        const int64_t ahead = at->ahead + (64 * step + at->ahead < at->apart ? 0 : 3 * at->apart);
        for (int64_t row = at->from; row < at->to; row++)
            for (int i = 0; i < ASKED_STEPS; i++) __builtin_prefetch(weights + row * at->apart + ahead + 64 * i);
        return;
    }
    for (int64_t asked = at->from; asked < at->to; asked += 64) __builtin_prefetch(weights + at->ahead + asked);
}

/* Adds to the sums [lines][4] what some steps of a panel, or of a row, give with each of the lines. */
INLINED void add_steps(const int form, const int count, const stretch *at, const char *const *lines, floats *sums) {
    floats own[TOGETHER][4], vectors[4];
    const char *weights = at->weights;
    const int64_t last = at->first + at->count;
#if HAS_PRODUCTS_OF_HALVES
    const __m512i table = _mm512_loadu_si512(NORMAL_FLOATS);
#endif
    for (int l = 0; l < count; l++)
        for (int j = 0; j < VECTORS(form); j++) own[l][j] = sums[4 * l + j];
    for (int64_t step = at->first; step < last;) {
        const int64_t stop = last - step < ASKED_STEPS ? last : step + ASKED_STEPS;
        ask_for(form, at, weights, step);
        for (; step < stop; step++, weights += IN_ROWS(form) ? 64 : STEP_BYTES(form)) {
#if HAS_PRODUCTS_OF_HALVES
            if (form == NF4_PANELS)
                unpack(weights, table, vectors);
            else
#endif
                for (int j = 0; j < VECTORS(form); j++) vectors[j] = kept(*(const floats *)(weights + (IN_ROWS(form) ? at->apart : 64) * j));
            for (int l = 0; l < count; l++)
                for (int j = 0; j < VECTORS(form); j++)
                    own[l][j] = added(form, own[l][j], vectors[j], lines[l], step);
        }
    }
    for (int l = 0; l < count; l++)
        for (int j = 0; j < VECTORS(form); j++) sums[4 * l + j] = own[l][j];
}

#define OF_FORM(form) \
    case form: \
        if (count == 1) add_steps(form, 1, at, lines, sums); \
        else if (count == 2) add_steps(form, 2, at, lines, sums); \
        else if (count <= 4) add_steps(form, 4, at, lines, sums); \
        else add_steps(form, TOGETHER, at, lines, sums); \
        return;

static void add_steps_of(int64_t form, int64_t count, const stretch *at, const char *const *lines, floats *sums) {
    switch (form) {
        OF_FORM(FLOAT_PANELS)
        OF_FORM(HALF_PANELS)
        OF_FORM(BYTE_PANELS)
        OF_FORM(NF4_PANELS)
        OF_FORM(FLOAT_ROWS)
        OF_FORM(HALF_ROWS)
    }
}

/* The same for any number of lines, some at a time; meanwhile the memory behind is asked for, a part each time. */
static void add_all(int64_t form, int64_t count, stretch at, const char *const *lines, floats *sums) {
    const int64_t turns = (count + TOGETHER - 1) / TOGETHER;
    const int64_t unit = IN_ROWS(form) ? 1 : 64, asked = IN_ROWS(form) ? 4 : ASKED_STEPS * STEP_BYTES(form) / 64;
    if (turns == 1) at.ahead = AHEAD;
    for (int64_t turn = 0; turn < turns; turn++, lines += TOGETHER, sums += 4 * TOGETHER, count -= TOGETHER) {
        at.from = asked * turn / turns * unit;
        at.to = asked * (turn + 1) / turns * unit;
        add_steps_of(form, count, &at, lines, sums);
    }
}
