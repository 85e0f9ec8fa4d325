/* Loops over bytes that numpy makes in several passes, or with the GIL held. Optional: without a compiler forebay does
   the same in numpy, bit for bit (tests/test_native.py compares the two).

   Every function checks sizes before it writes, then releases the GIL. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define FAST __attribute__((target_clones("avx2", "default")))
#else
#define FAST
#endif

enum { IGNORED_LABEL = -100 };

static int failed(const char *reason) {
    PyErr_SetString(PyExc_ValueError, reason);
    return -1;
}

/* Buffers that are released together; an optional one that is None has no memory. */
typedef struct {
    Py_buffer all[6];
    int count;
} Buffers;

static int take(Buffers *buffers, PyObject *object, int flags) {
    if (PyObject_GetBuffer(object, &buffers->all[buffers->count], flags) < 0) return -1;
    buffers->count++;
    return 0;
}

static void release(Buffers *buffers) {
    while (buffers->count) PyBuffer_Release(&buffers->all[--buffers->count]);
}

/* gather(out, addresses, item_bytes): copy the item at each address. */

static void prefetch(const char *address) {
#if defined(__GNUC__)
    __builtin_prefetch(address);
    __builtin_prefetch(address + 64);
#endif
}

static PyObject *gather(PyObject *self, PyObject *args) {
    PyObject *out_object, *addresses_object, *result = NULL;
    Py_ssize_t item;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOn", &out_object, &addresses_object, &item)) return NULL;
    if (take(&buffers, out_object, PyBUF_WRITABLE) < 0 || take(&buffers, addresses_object, PyBUF_SIMPLE) < 0) goto end;
    Py_ssize_t count = buffers.all[1].len / (Py_ssize_t)sizeof(int64_t);
    if (item < 0 || (item && count > PY_SSIZE_T_MAX / item) || buffers.all[0].len != count * item) {
        failed("out must hold one item for each address");
        goto end;
    }
    char *out = buffers.all[0].buf;
    const int64_t *addresses = buffers.all[1].buf;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < count; at++) {
        if (at + 1 < count) prefetch((const char *)(intptr_t)addresses[at + 1]);
        memcpy(out + at * item, (const void *)(intptr_t)addresses[at], (size_t)item);
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

/* gather_rows(out, chunks, rows, bases, limits, item_bytes) -> bool

   Copy row rows[i] of chunk chunks[i]. bases has the address of each chunk's first row, 0 where it is not mapped; limits
   has the offsets in bytes, exclusive, at which a row may start. Returns False, and leaves `out` unfinished, at the
   first row that is not mapped or out of bounds. */

static PyObject *gather_rows(PyObject *self, PyObject *args) {
    PyObject *objects[5], *result = NULL;
    Py_ssize_t item;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOOOOn", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4], &item))
        return NULL;
    for (int at = 0; at < 5; at++)
        if (take(&buffers, objects[at], at ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) goto end;
    Py_ssize_t count = buffers.all[1].len / (Py_ssize_t)sizeof(int64_t);
    uint64_t chunk_count = (uint64_t)buffers.all[3].len / sizeof(int64_t);
    if (item < 1 || count > PY_SSIZE_T_MAX / item || buffers.all[0].len != count * item ||
        buffers.all[2].len != buffers.all[1].len || buffers.all[4].len != buffers.all[3].len) {
        failed("out must hold one item for each row, and tables one number for each chunk");
        goto end;
    }
    char *out = buffers.all[0].buf;
    const int64_t *chunks = buffers.all[1].buf, *rows = buffers.all[2].buf, *bases = buffers.all[3].buf;
    const uint64_t *limits = buffers.all[4].buf;
    Py_ssize_t at = 0;
    Py_BEGIN_ALLOW_THREADS
    for (; at < count; at++) {
        uint64_t chunk = (uint64_t)chunks[at], row = (uint64_t)rows[at];
        if (chunk >= chunk_count || !bases[chunk] || row > (uint64_t)INT64_MAX / (uint64_t)item ||
            row * (uint64_t)item >= limits[chunk])
            break;
        if (at + 1 < count && (uint64_t)chunks[at + 1] < chunk_count)
            prefetch((const char *)(intptr_t)((uint64_t)bases[chunks[at + 1]] + (uint64_t)rows[at + 1] * (uint64_t)item));
        memcpy(out + at * item, (const void *)(intptr_t)((uint64_t)bases[chunk] + row * (uint64_t)item), (size_t)item);
    }
    Py_END_ALLOW_THREADS
    result = PyBool_FromLong(at == count);
end:
    release(&buffers);
    return result;
}

/* derive_packed(tokens, token_bytes, whole, documents, width, wide, labels, positions, shifted)

   whole      int32 [rows, documents]: lengths that fill each row; the last is padding
   wide, labels, positions      int64 [rows, width], or None

       tokens       5 6 7 8 9 0 0     lengths 3 2 2
       positions    0 1 2 0 1 0 1
       shifted      6 7 . 9 . . .     . = -100
       unshifted    . 6 7 . 9 . .
*/

static FAST void widen_16(int64_t *out, const uint16_t *tokens, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = tokens[at];
}

static FAST void widen_32(int64_t *out, const uint32_t *tokens, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = tokens[at];
}

static FAST void count_up(int64_t *out, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = at;
}

static FAST void ignore(int64_t *out, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = IGNORED_LABEL;
}

static void widen(int64_t *out, const char *tokens, Py_ssize_t token_bytes, Py_ssize_t count) {
    if (token_bytes == 2)
        widen_16(out, (const uint16_t *)tokens, count);
    else
        widen_32(out, (const uint32_t *)tokens, count);
}

static void label_document(int64_t *out, const char *tokens, Py_ssize_t token_bytes, Py_ssize_t length, int shifted) {
    if (shifted) {
        widen(out, tokens + token_bytes, token_bytes, length - 1);
        out[length - 1] = IGNORED_LABEL;
    } else {
        out[0] = IGNORED_LABEL;
        widen(out + 1, tokens + token_bytes, token_bytes, length - 1);
    }
}

static int fills_rows(const int32_t *whole, Py_ssize_t rows, Py_ssize_t documents, Py_ssize_t width) {
    for (Py_ssize_t row = 0; row < rows; row++) {
        int64_t total = 0;
        for (Py_ssize_t at = 0; at < documents; at++) {
            int32_t length = whole[row * documents + at];
            if (length < 0) return 0;
            total += length;
        }
        if (total != width) return 0;
    }
    return 1;
}

static PyObject *derive_packed(PyObject *self, PyObject *args) {
    PyObject *tokens_object, *whole_object, *outs[3], *result = NULL;
    Py_ssize_t token_bytes, documents, width;
    int shifted;
    Buffers buffers = {.count = 0};
    int64_t *targets[3] = {NULL, NULL, NULL};
    if (!PyArg_ParseTuple(args, "OnOnnOOOp", &tokens_object, &token_bytes, &whole_object, &documents, &width, &outs[0],
                          &outs[1], &outs[2], &shifted))
        return NULL;
    if (take(&buffers, tokens_object, PyBUF_SIMPLE) < 0 || take(&buffers, whole_object, PyBUF_SIMPLE) < 0) goto end;
    if ((token_bytes != 2 && token_bytes != 4) || documents < 1 || width < 1 || width > INT32_MAX ||
        documents > INT32_MAX) {
        failed("tokens must have 2 or 4 bytes, and rows at least one token and one length");
        goto end;
    }
    Py_ssize_t rows = buffers.all[0].len / (token_bytes * width);
    if (rows * token_bytes * width != buffers.all[0].len ||
        rows * documents * (Py_ssize_t)sizeof(int32_t) != buffers.all[1].len) {
        failed("tokens and lengths must have the same rows");
        goto end;
    }
    for (int at = 0; at < 3; at++) {
        if (Py_IsNone(outs[at])) continue;
        if (take(&buffers, outs[at], PyBUF_WRITABLE) < 0) goto end;
        Py_buffer *taken = &buffers.all[buffers.count - 1];
        if (taken->len != rows * width * (Py_ssize_t)sizeof(int64_t)) {
            failed("outputs must be int64 [rows, width]");
            goto end;
        }
        targets[at] = taken->buf;
    }
    const char *tokens = buffers.all[0].buf;
    const int32_t *whole = buffers.all[1].buf;
    if (!fills_rows(whole, rows, documents, width)) {
        failed("the lengths of a row do not add up to its tokens");
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t row = 0; row < rows; row++) {
        Py_ssize_t first = row * width;
        if (targets[0]) widen(targets[0] + first, tokens + first * token_bytes, token_bytes, width);
        for (Py_ssize_t at = 0; at < documents; at++) {
            Py_ssize_t length = whole[row * documents + at];
            if (!length) continue;
            if (targets[1] && at == documents - 1)
                ignore(targets[1] + first, length);
            else if (targets[1])
                label_document(targets[1] + first, tokens + first * token_bytes, token_bytes, length, shifted);
            if (targets[2]) count_up(targets[2] + first, length);
            first += length;
        }
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

/* mirror(out, content, width): lines of `width` bytes, each reversed. */

static FAST void reverse(uint8_t *out, const uint8_t *line, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = line[count - 1 - at];
}

static PyObject *mirror(PyObject *self, PyObject *args) {
    PyObject *out_object, *content_object, *result = NULL;
    Py_ssize_t width;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOn", &out_object, &content_object, &width)) return NULL;
    if (take(&buffers, out_object, PyBUF_WRITABLE) < 0 || take(&buffers, content_object, PyBUF_SIMPLE) < 0) goto end;
    Py_ssize_t bytes = buffers.all[1].len;
    if (width < 1 || bytes % width || buffers.all[0].len != bytes) {
        failed("out and content must have lines of the same width");
        goto end;
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < bytes; at += width)
        reverse((uint8_t *)buffers.all[0].buf + at, (const uint8_t *)buffers.all[1].buf + at, width);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

/* paint(canvas, size, content, box, pad): content [3, lines, columns] in its box on a canvas [3, height, width].
   paint_scaled(canvas, size, content, box, pad, scale, shift): the same as float32, value * scale + shift. */

typedef struct {
    Py_ssize_t height, width, left, top, columns, lines;
} Placement;

static int placed(const Placement *at, Py_ssize_t canvas_values, Py_ssize_t content_bytes) {
    if (at->height < 0 || at->width < 0 || at->left < 0 || at->top < 0 || at->columns < 0 || at->lines < 0 ||
        at->height > 65536 || at->width > 65536 || at->columns > at->width - at->left ||
        at->lines > at->height - at->top)
        return failed("the box is outside the canvas");
    if (canvas_values != 3 * at->height * at->width || content_bytes != 3 * at->lines * at->columns)
        return failed("canvas and content must have the sizes that are passed");
    return 0;
}

static void paint_bytes(uint8_t *canvas, const uint8_t *content, const Placement *at, const uint8_t *pad) {
    Py_ssize_t right = at->width - at->left - at->columns, below = at->height - at->top - at->lines;
    for (int plane = 0; plane < 3; plane++) {
        memset(canvas, pad[plane], (size_t)(at->top * at->width));
        canvas += at->top * at->width;
        for (Py_ssize_t line = 0; line < at->lines; line++) {
            memset(canvas, pad[plane], (size_t)at->left);
            memcpy(canvas + at->left, content, (size_t)at->columns);
            memset(canvas + at->left + at->columns, pad[plane], (size_t)right);
            canvas += at->width;
            content += at->columns;
        }
        memset(canvas, pad[plane], (size_t)(below * at->width));
        canvas += below * at->width;
    }
}

static FAST void fill_floats(float *out, float value, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = value;
}

/* Two roundings, as numpy's multiply and add: the file is compiled without contraction to a fused multiply-add. */
static FAST void scale_line(float *out, const uint8_t *line, Py_ssize_t count, float scale, float shift) {
    for (Py_ssize_t at = 0; at < count; at++) out[at] = (float)line[at] * scale + shift;
}

static void paint_floats(float *canvas, const uint8_t *content, const Placement *at, const float *pad,
                         const float *scale, const float *shift) {
    Py_ssize_t right = at->width - at->left - at->columns, below = at->height - at->top - at->lines;
    for (int plane = 0; plane < 3; plane++) {
        fill_floats(canvas, pad[plane], at->top * at->width);
        canvas += at->top * at->width;
        for (Py_ssize_t line = 0; line < at->lines; line++) {
            fill_floats(canvas, pad[plane], at->left);
            scale_line(canvas + at->left, content, at->columns, scale[plane], shift[plane]);
            fill_floats(canvas + at->left + at->columns, pad[plane], right);
            canvas += at->width;
            content += at->columns;
        }
        fill_floats(canvas, pad[plane], below * at->width);
        canvas += below * at->width;
    }
}

static PyObject *paint(PyObject *self, PyObject *args) {
    PyObject *canvas, *content, *result = NULL;
    Placement at;
    unsigned char pad[3];
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "O(nn)O(nnnn)(bbb)", &canvas, &at.height, &at.width, &content, &at.left, &at.top,
                          &at.columns, &at.lines, &pad[0], &pad[1], &pad[2]))
        return NULL;
    if (take(&buffers, canvas, PyBUF_WRITABLE) < 0 || take(&buffers, content, PyBUF_SIMPLE) < 0) goto end;
    if (placed(&at, buffers.all[0].len, buffers.all[1].len) < 0) goto end;
    Py_BEGIN_ALLOW_THREADS
    paint_bytes(buffers.all[0].buf, buffers.all[1].buf, &at, pad);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

static PyObject *paint_scaled(PyObject *self, PyObject *args) {
    PyObject *canvas, *content, *result = NULL;
    Placement at;
    float pad[3], scale[3], shift[3];
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "O(nn)O(nnnn)(fff)(fff)(fff)", &canvas, &at.height, &at.width, &content, &at.left,
                          &at.top, &at.columns, &at.lines, &pad[0], &pad[1], &pad[2], &scale[0], &scale[1], &scale[2],
                          &shift[0], &shift[1], &shift[2]))
        return NULL;
    if (take(&buffers, canvas, PyBUF_WRITABLE) < 0 || take(&buffers, content, PyBUF_SIMPLE) < 0) goto end;
    if (buffers.all[0].len % (Py_ssize_t)sizeof(float)) {
        failed("the canvas must be float32");
        goto end;
    }
    if (placed(&at, buffers.all[0].len / (Py_ssize_t)sizeof(float), buffers.all[1].len) < 0) goto end;
    Py_BEGIN_ALLOW_THREADS
    paint_floats(buffers.all[0].buf, buffers.all[1].buf, &at, pad, scale, shift);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
end:
    release(&buffers);
    return result;
}

/* token_places(places, ids, skipped, offsets, bytes, text) -> bool

   Write where each token begins in `text`. Token id is bytes[offsets[id]:offsets[id + 1]] without its first skipped[i]
   bytes; all tokens, one behind the other, must be the text. Returns False at the first that is not.

   places, offsets      int64
   ids                  uint32
   skipped              uint8, like ids */

static PyObject *token_places(PyObject *self, PyObject *args) {
    PyObject *objects[6], *result = NULL;
    Buffers buffers = {.count = 0};
    if (!PyArg_ParseTuple(args, "OOOOOO", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4], &objects[5]))
        return NULL;
    for (int at = 0; at < 6; at++)
        if (take(&buffers, objects[at], at ? PyBUF_SIMPLE : PyBUF_WRITABLE) < 0) goto end;
    Py_ssize_t count = buffers.all[1].len / (Py_ssize_t)sizeof(uint32_t);
    Py_ssize_t ids_known = buffers.all[3].len / (Py_ssize_t)sizeof(int64_t) - 1;
    if (buffers.all[0].len / (Py_ssize_t)sizeof(int64_t) != count || buffers.all[2].len != count || ids_known < 0) {
        failed("places and skipped must have one number for each id");
        goto end;
    }
    int64_t *places = buffers.all[0].buf;
    const uint32_t *ids = buffers.all[1].buf;
    const uint8_t *skipped = buffers.all[2].buf;
    const int64_t *offsets = buffers.all[3].buf;
    const char *bytes = buffers.all[4].buf, *text = buffers.all[5].buf;
    int64_t size = buffers.all[4].len, text_size = buffers.all[5].len, begin = 0;
    Py_ssize_t at = 0;
    Py_BEGIN_ALLOW_THREADS
    for (; at < count; at++) {
        if ((Py_ssize_t)ids[at] >= ids_known) break;
        int64_t start = offsets[ids[at]], stop = offsets[ids[at] + 1];
        if (start < 0 || stop > size || stop - start < skipped[at]) break;
        start += skipped[at];
        if (stop - start > text_size - begin) break;
        int64_t same = 0, length = stop - start; /* tokens are short: a call of memcmp takes longer */
        if (length > 0 && length <= 8 && start + 8 <= size && begin + 8 <= text_size) {
            uint64_t mine, theirs; /* on big-endian machines the loop below decides */
            memcpy(&mine, bytes + start, 8);
            memcpy(&theirs, text + begin, 8);
            if (length == 8 ? mine == theirs : PY_LITTLE_ENDIAN && !((mine ^ theirs) << (64 - 8 * length))) same = length;
        }
        while (same < length && bytes[start + same] == text[begin + same]) same++;
        if (same < length) break;
        places[at] = begin;
        begin += length;
    }
    Py_END_ALLOW_THREADS
    result = PyBool_FromLong(at == count && begin == text_size);
end:
    release(&buffers);
    return result;
}

static PyMethodDef methods[] = {
    {"gather", gather, METH_VARARGS, "Copy the item at each address to out."},
    {"gather_rows", gather_rows, METH_VARARGS, "Copy rows of mapped chunks to out; False where one is out of bounds."},
    {"derive_packed", derive_packed, METH_VARARGS, "Write int64 tokens, labels and positions of packed rows."},
    {"mirror", mirror, METH_VARARGS, "Reverse each line of bytes."},
    {"paint", paint, METH_VARARGS, "Paint content and padding on a canvas of bytes."},
    {"paint_scaled", paint_scaled, METH_VARARGS, "Paint scaled content and padding on a canvas of float32."},
    {"token_places", token_places, METH_VARARGS, "Write where tokens begin in a text; False if they are not its bytes."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "forebay._native", "Loops in C; each has a twin in numpy.", 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&module); }
