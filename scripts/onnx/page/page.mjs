// The page: a photo, a visible mask and a sentence -> which mask is meant, and the complete mask.

import { cutCrop, pasteMask, windowAround } from "./crops.mjs";
import { WordPiece } from "./wordpiece.mjs";

const MISSING =
  "onnxruntime-web is missing: put three files of it into the folder ort beside this page (scripts/onnx/README.md).";
const VISIBLE = [255, 160, 0]; // orange
const HIDDEN = [0, 110, 255]; // blue
const ELEMENTS = Object.fromEntries(
  ["photo", "mask", "brush", "eraser", "clear", "stage", "ask", "sentence", "answer", "save", "status"].map(
    (id) => [id, document.getElementById(id)],
  ),
);
const context = ELEMENTS.stage.getContext("2d", { willReadFrequently: true });

const state = {
  photo: null, // ImageData
  visible: null, // 0 and 1 for each pixel
  complete: null,
  brushed: null, // the last place of the brush
};
let models = null;

function say(text) {
  ELEMENTS.status.textContent = text;
}

// Models

async function loadModels() {
  let ort;
  try {
    ort = await import("onnxruntime-web");
  } catch {
    throw new Error(MISSING);
  }
  ort.env.wasm.numThreads = 1; // more need headers that simple servers do not send
  const settings = await readJson("onnx.json");
  const tokenizer = new WordPiece(await readJson("tokenizer.json"), settings.max_tokens);
  const options = { executionProviders: ["wasm"] };
  const decide = await ort.InferenceSession.create("decide.onnx", options);
  const complete = await ort.InferenceSession.create("complete.onnx", options);
  return { ort, settings, tokenizer, decide, complete };
}

async function readJson(name) {
  const response = await fetch(name);
  if (!response.ok) {
    throw new Error(`${name} cannot be read (${response.status})`);
  }
  return response.json();
}

// The calibrated probability that a sentence asks for the complete shape.
async function decide(sentence) {
  const { ort, tokenizer, decide: session } = models;
  const ids = tokenizer.encode(sentence);
  const shape = [1, ids.length];
  const inputs = {
    ids: new ort.Tensor("int32", Int32Array.from(ids), shape),
    mask: new ort.Tensor("bool", new Uint8Array(ids.length).fill(1), shape),
  };
  const { probability } = await session.run(inputs, ["probability"]);
  return probability.data[0];
}

async function complete(window) {
  const { ort, settings, complete: session } = models;
  const { width, height, data } = state.photo;
  const size = settings.crop_size;
  const crop = cutCrop(data, state.visible, width, height, window, size);
  const inputs = {
    crops: new ort.Tensor("uint8", crop, [1, size, size, 6]),
    others_known: new ort.Tensor("float32", new Float32Array(1), [1]),
  };
  const { logits } = await session.run(inputs);
  const threshold = settings.complete_threshold;
  return pasteMask(logits.data, state.visible, width, height, window, size, threshold);
}

// Photo and mask

async function openPhoto(file) {
  const picture = await createImageBitmap(file);
  ELEMENTS.stage.width = picture.width;
  ELEMENTS.stage.height = picture.height;
  context.drawImage(picture, 0, 0);
  state.photo = context.getImageData(0, 0, picture.width, picture.height);
  clearMask();
}

async function openMask(file) {
  if (!state.photo) {
    throw new Error("Open the photo first.");
  }
  const { width, height } = state.photo;
  const picture = await createImageBitmap(file);
  if (picture.width !== width || picture.height !== height) {
    throw new Error(
      `The mask has ${picture.width} x ${picture.height} pixels, the photo ${width} x ${height}; ` +
        "give a mask of the photo's size.",
    );
  }
  const canvas = new OffscreenCanvas(width, height);
  const drawing = canvas.getContext("2d");
  drawing.drawImage(picture, 0, 0);
  const levels = levelsOf(drawing.getImageData(0, 0, width, height).data);
  const highest = levels.reduce((one, other) => Math.max(one, other));
  if (highest === 0) {
    throw new Error("The mask is black everywhere; draw what shows of the object in white.");
  }
  if (levels.filter((level) => level > 0 && level < highest).length > levels.length / 2) {
    throw new Error("Most of the mask is neither black nor white, as in a photo; draw a mask.");
  }
  const visible = levels.map((level) => (2 * level > highest ? 1 : 0));
  const corners = [0, width - 1, (height - 1) * width, height * width - 1];
  if (corners.every((place) => visible[place])) {
    throw new Error("All corners of the photo are mask; are black and white inverted?");
  }
  clearMask();
  state.visible.set(visible);
  draw();
}

// How much each pixel belongs to a drawn mask, as `predict --mask` reads it: the transparency where
// it varies, or else the brightest channel.
function levelsOf(data) {
  const alpha = data.filter((_, index) => index % 4 === 3);
  if (alpha.some((value) => value !== alpha[0])) {
    return alpha;
  }
  return alpha.map((_, place) => Math.max(...data.subarray(4 * place, 4 * place + 3)));
}

// Tells masks from photos: a picture in grey or two colours is a mask.
async function isDrawn(file) {
  const picture = await createImageBitmap(file);
  const drawing = new OffscreenCanvas(picture.width, picture.height).getContext("2d");
  drawing.drawImage(picture, 0, 0);
  const { data } = drawing.getImageData(0, 0, picture.width, picture.height);
  const colours = new Set();
  let isGrey = true;
  for (let i = 0; i < data.length && (isGrey || colours.size <= 2); i += 4) {
    colours.add(data.subarray(i, i + 4).join());
    isGrey &&= data[i] === data[i + 1] && data[i] === data[i + 2];
  }
  return isGrey || colours.size <= 2;
}

function clearMask() {
  state.visible = state.photo && new Uint8Array(state.photo.width * state.photo.height);
  forgetAnswer();
  draw();
}

function forgetAnswer() {
  state.complete = null;
  ELEMENTS.save.hidden = true;
  say("");
}

function draw() {
  if (!state.photo) {
    return;
  }
  const { width, height, data } = state.photo;
  const drawn = new ImageData(new Uint8ClampedArray(data), width, height);
  for (let place = 0; place < width * height; place++) {
    let colour = null;
    if (state.visible[place]) {
      colour = VISIBLE;
    } else if (state.complete?.[place]) {
      colour = HIDDEN;
    }
    for (let channel = 0; colour && channel < 3; channel++) {
      const i = 4 * place + channel;
      drawn.data[i] = (data[i] + colour[channel]) / 2;
    }
  }
  context.putImageData(drawn, 0, 0);
}

// The brush

function placeOf(event) {
  const box = ELEMENTS.stage.getBoundingClientRect();
  return [
    ((event.clientX - box.left) * ELEMENTS.stage.width) / box.width,
    ((event.clientY - box.top) * ELEMENTS.stage.height) / box.height,
  ];
}

function paint(from, to) {
  const { width, height } = state.photo;
  const radius = Number(ELEMENTS.brush.value);
  const value = ELEMENTS.eraser.checked ? 0 : 1;
  const steps = Math.ceil(Math.hypot(to[0] - from[0], to[1] - from[1])) + 1;
  for (let step = 0; step <= steps; step++) {
    const x = from[0] + ((to[0] - from[0]) * step) / steps;
    const y = from[1] + ((to[1] - from[1]) * step) / steps;
    const bottom = Math.min(height - 1, Math.ceil(y + radius));
    const right = Math.min(width - 1, Math.ceil(x + radius));
    for (let row = Math.max(0, Math.floor(y - radius)); row <= bottom; row++) {
      for (let column = Math.max(0, Math.floor(x - radius)); column <= right; column++) {
        if (Math.hypot(column + 0.5 - x, row + 0.5 - y) <= radius) {
          state.visible[row * width + column] = value;
        }
      }
    }
  }
  draw();
}

// The answer

async function answer() {
  const sentence = ELEMENTS.sentence.value;
  if (!/[\p{L}\p{N}_]/u.test(sentence)) {
    throw new Error("The sentence is empty or has no words.");
  }
  forgetAnswer();
  const probability = await decide(sentence);
  const type = probability > 0.5 ? "amodal" : "modal";
  const meaning = type === "amodal" ? "the complete shape" : "what shows of the object";
  const text = `${type}: ${meaning} is meant (probability of amodal ${probability.toFixed(3)}).`;
  const window =
    state.photo &&
    windowAround(state.visible, state.photo.width, state.photo.height, models.settings);
  if (!window) {
    draw();
    say(`${text} Open a photo and mark an object to see its mask.`);
    return;
  }
  if (type === "amodal") {
    state.complete = await complete(window);
  }
  draw();
  await offer(state.complete ?? state.visible);
  say(text);
}

// Makes a PNG of the mask that is meant.
async function offer(mask) {
  const { width, height } = state.photo;
  const picture = new ImageData(width, height);
  for (let place = 0; place < mask.length; place++) {
    picture.data.fill(255 * mask[place], 4 * place, 4 * place + 3);
    picture.data[4 * place + 3] = 255;
  }
  const canvas = new OffscreenCanvas(width, height);
  canvas.getContext("2d").putImageData(picture, 0, 0);
  URL.revokeObjectURL(ELEMENTS.save.href);
  ELEMENTS.save.href = URL.createObjectURL(await canvas.convertToBlob({ type: "image/png" }));
  ELEMENTS.save.hidden = false;
}

// Events

// Runs one action, and shows its error in the page.
async function attempt(action) {
  try {
    await action();
  } catch (error) {
    say(error.message);
  }
}

for (const [id, open] of [["photo", openPhoto], ["mask", openMask]]) {
  ELEMENTS[id].addEventListener("change", (event) => {
    const [file] = event.target.files;
    if (file) {
      attempt(() => open(file));
    }
  });
}
ELEMENTS.clear.addEventListener("click", clearMask);
ELEMENTS.stage.addEventListener("dragover", (event) => event.preventDefault());
ELEMENTS.stage.addEventListener("drop", (event) => {
  event.preventDefault();
  attempt(async () => {
    // A photo that comes with its mask is opened first.
    const files = [...event.dataTransfer.files];
    const drawn = new Map();
    for (const file of files) {
      drawn.set(file, file.type === "image/png" && (await isDrawn(file)));
    }
    files.sort((one, other) => drawn.get(one) - drawn.get(other));
    for (const file of files) {
      await (state.photo && drawn.get(file) ? openMask(file) : openPhoto(file));
    }
  });
});
ELEMENTS.stage.addEventListener("pointerdown", (event) => {
  if (state.photo) {
    ELEMENTS.stage.setPointerCapture(event.pointerId);
    forgetAnswer();
    state.brushed = placeOf(event);
    paint(state.brushed, state.brushed);
  }
});
ELEMENTS.stage.addEventListener("pointermove", (event) => {
  if (state.brushed) {
    const place = placeOf(event);
    paint(state.brushed, place);
    state.brushed = place;
  }
});
for (const name of ["pointerup", "pointercancel"]) {
  ELEMENTS.stage.addEventListener(name, () => {
    state.brushed = null;
  });
}
ELEMENTS.ask.addEventListener("submit", async (event) => {
  event.preventDefault();
  ELEMENTS.answer.disabled = true;
  await attempt(answer);
  ELEMENTS.answer.disabled = false;
});

attempt(async () => {
  models = await loadModels();
  ELEMENTS.answer.disabled = false;
  say("Ready.");
});
