// Square crops around visible masks, and the way back to the image (data/crops.py).

const CHANNELS = 6; // colours, inside of the image, visible mask, masks of the other objects
const OUTSIDE_LOGIT = -20;

// The window around a mask of 0 and 1 that leaves room for what is hidden; null if it is empty.
export function windowAround(mask, width, height, settings) {
  let [x0, y0, x1, y1] = [width, height, 0, 0];
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      if (mask[y * width + x]) {
        x0 = Math.min(x0, x);
        x1 = Math.max(x1, x + 1);
        y0 = Math.min(y0, y);
        y1 = Math.max(y1, y + 1);
      }
    }
  }
  if (x1 === 0) {
    return null;
  }
  const longest = Math.max(x1 - x0, y1 - y0);
  const side = Math.max(settings.min_crop_side, Math.round(settings.crop_extent * longest));
  return {
    x: Math.floor((x0 + x1 - side) / 2),
    y: Math.floor((y0 + y1 - side) / 2),
    side,
  };
}

// The completer's input [1 size size 6] for one object whose neighbours are not known.
// `pixels`: RGBA of the image. `mask`: 0 and 1.
export function cutCrop(pixels, mask, width, height, window, size) {
  const crop = new Uint8Array(size * size * CHANNELS);
  const readers = [
    (place) => pixels[4 * place],
    (place) => pixels[4 * place + 1],
    (place) => pixels[4 * place + 2],
    () => 255,
    (place) => 255 * mask[place],
  ];
  readers.forEach((read, channel) => {
    const canvas = new Float32Array(window.side * window.side);
    eachPixelInside(width, height, window, (place, inWindow) => {
      canvas[inWindow] = read(place);
    });
    const resized = resize(canvas, window.side, size, true);
    for (let place = 0; place < size * size; place++) {
      crop[place * CHANNELS + channel] = resized[place];
    }
  });
  return crop;
}

// The complete mask of 0 and 1 at the image's resolution; it contains the visible one.
export function pasteMask(logits, mask, width, height, window, size, threshold) {
  const scaled = resize(logits, size, window.side, false);
  const complete = new Uint8Array(width * height);
  for (let place = 0; place < complete.length; place++) {
    complete[place] = mask[place] || OUTSIDE_LOGIT > threshold ? 1 : 0;
  }
  eachPixelInside(width, height, window, (place, inWindow) => {
    complete[place] = mask[place] || scaled[inWindow] > threshold ? 1 : 0;
  });
  return complete;
}

function eachPixelInside(width, height, window, visit) {
  const bottom = Math.min(height, window.y + window.side);
  const right = Math.min(width, window.x + window.side);
  for (let y = Math.max(0, window.y); y < bottom; y++) {
    for (let x = Math.max(0, window.x); x < right; x++) {
      visit(y * width + x, (y - window.y) * window.side + x - window.x);
    }
  }
}

// Scales a square as Pillow's BILINEAR does: antialiased where it shrinks.
// `rounds`: to whole numbers after each of the two passes, as for images of 8 bits.
export function resize(values, from, to, rounds) {
  const taps = filterTaps(from, to);
  const rows = new Float32Array(from * to);
  for (let y = 0; y < from; y++) {
    for (let x = 0; x < to; x++) {
      rows[y * to + x] = weightedSum(values, taps[x], y * from, 1, rounds);
    }
  }
  const out = new Float32Array(to * to);
  for (let y = 0; y < to; y++) {
    for (let x = 0; x < to; x++) {
      out[y * to + x] = weightedSum(rows, taps[y], x, to, rounds);
    }
  }
  return out;
}

function weightedSum(values, taps, offset, stride, rounds) {
  let total = 0;
  for (let i = 0; i < taps.weights.length; i++) {
    total += taps.weights[i] * values[offset + (taps.first + i) * stride];
  }
  return rounds ? Math.floor(total + 0.5) : total;
}

// For each place of the output the first place of the input that it reads, and their weights.
function filterTaps(from, to) {
  const scale = from / to;
  const reach = Math.max(1, scale);
  const taps = [];
  for (let place = 0; place < to; place++) {
    const centre = (place + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - reach + 0.5));
    const end = Math.min(from, Math.trunc(centre + reach + 0.5));
    const weights = [];
    let sum = 0;
    for (let i = first; i < end; i++) {
      const weight = Math.max(0, 1 - Math.abs((i - centre + 0.5) / reach));
      weights.push(weight);
      sum += weight;
    }
    taps.push({ first, weights: weights.map((weight) => weight / sum) });
  }
  return taps;
}
