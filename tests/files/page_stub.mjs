// Runs page.mjs in node with stubs of the DOM: opens a photo and masks, and prints the marked pixels.
const [WIDTH, HEIGHT] = [20, 10];
const elements = {};
class Context {
  drawImage(picture) {
    this.data = picture.data;
  }
  getImageData(x, y, width, height) {
    return new ImageData(new Uint8ClampedArray(this.data), width, height);
  }
  putImageData(image) {
    elements.drawn = image.data;
  }
}
globalThis.ImageData = class {
  constructor(data, width, height) {
    Object.assign(this, { data, width, height });
    if (typeof data === "number") {
      this.data = new Uint8ClampedArray(4 * data * width);
      [this.width, this.height] = [data, width];
    }
  }
};
globalThis.OffscreenCanvas = class {
  getContext() {
    return new Context();
  }
};
const makeElement = (id) => ({
  id,
  value: "16",
  handlers: {},
  context: new Context(),
  addEventListener(name, handler) {
    this.handlers[name] = handler;
  },
  getContext() {
    return this.context;
  },
});
globalThis.document = { getElementById: (id) => (elements[id] ??= makeElement(id)) };
globalThis.createImageBitmap = async (file) => file;
globalThis.fetch = async () => ({ ok: false, status: 404 });

// The first eight columns are the object.
function picture(colourOf) {
  const data = new Uint8ClampedArray(4 * WIDTH * HEIGHT);
  for (let place = 0; place < WIDTH * HEIGHT; place++) {
    data.set(colourOf(Number(place % WIDTH < 8), place), 4 * place);
  }
  return { width: WIDTH, height: HEIGHT, data, type: "image/png" };
}
const wait = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
await import("./page.mjs");
await wait(50);
const photo = picture((_, place) => [100, place, 120, 255]);
async function open(name, ...masks) {
  elements.status.textContent = "";
  elements.photo.handlers.change({ type: "change", target: { files: [photo] } });
  await wait(20);
  const plain = elements.drawn.slice();
  const files = [...masks];
  const event = { type: "drop", preventDefault() {}, dataTransfer: { files } };
  if (files.length === 1) {
    elements.mask.handlers.change({ type: "change", target: { files } });
  } else {
    elements.stage.handlers.drop(event);
  }
  await wait(20);
  let marked = 0;
  for (let i = 0; i < plain.length; i += 4) {
    marked += Number(plain[i] !== elements.drawn[i]);
  }
  console.log(`${name}: ${marked} ${elements.status.textContent}`);
}
await open("white", picture((m) => [m * 255, m * 255, m * 255, 255]));
await open("blue", picture((m) => [0, 0, m * 255, 255]));
await open("labels", picture((m) => [m, m, m, 255]));
await open("transparent", picture((m) => [0, 0, 0, m * 255]));
await open("black", picture(() => [0, 0, 0, 255]));
await open("photo", picture((_, place) => [place, 0, 0, 255]));
await open("inverted", picture(() => [255, 255, 255, 255]));
await open("red beside its photo", picture((m) => [m * 255, 0, 0, 255]), photo);
process.exit(0);
