// The picture of a head as a file.
import { theme } from "./colours.js";
import { drawHead, layout } from "./head_picture.js";
import { canvasSurface, svgSurface } from "./surfaces.js";
import { iterations } from "./labels.js";

const WIDTH = 760;

export function savePicture(state, panel, shown, kind) {
  const { head, result } = shown;
  const place = layout(state.data, head, WIDTH, true);
  const title = `${panel.model.name}, layer ${head.layer}, head ${head.number}`;
  const options = { colours: theme(state.look.theme), root: state.look.root, focus: state.focus, title };
  const file = `layer-${head.layer}-head-${head.number}-n-${result.nIters === Infinity ? "limit" : iterations(result.nIters)}`;
  if (kind === "svg") {
    const surface = svgSurface(place.width, place.height, title);
    drawHead(surface, place, shown, options);
    return download(new Blob([surface.source()], { type: "image/svg+xml" }), `${file}.svg`);
  }
  const canvas = document.createElement("canvas");
  drawHead(canvasSurface(canvas, place.width, place.height, 2), place, shown, options);
  return canvas.toBlob((blob) => download(blob, `${file}.png`), "image/png");
}

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
