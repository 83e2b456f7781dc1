// Two surfaces with the same methods, so that one function draws a picture on the screen, as PNG and as SVG.
import { css } from "./colours.js";

export const FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', sans-serif";
const ALIGN = { start: "left", middle: "center", end: "right" };

// A canvas of `width` × `height` CSS pixels with `density` dots for each.
export function canvasSurface(canvas, width, height, density) {
  canvas.width = Math.max(1, Math.round(width * density));
  canvas.height = Math.max(1, Math.round(height * density));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(density, 0, 0, density, 0, 0);
  context.clearRect(0, 0, width, height);
  context.direction = "ltr";
  return {
    rect(x, y, w, h, { fill, stroke, thickness = 1 }) {
      if (fill) {
        context.fillStyle = fill;
        context.fillRect(x, y, w, h);
      }
      if (stroke) {
        context.strokeStyle = stroke;
        context.lineWidth = thickness;
        context.strokeRect(x, y, w, h);
      }
    },
    line(x1, y1, x2, y2, { stroke, dash = [] }) {
      context.strokeStyle = stroke;
      context.lineWidth = 1;
      context.setLineDash(dash);
      context.beginPath();
      context.moveTo(x1, y1);
      context.lineTo(x2, y2);
      context.stroke();
      context.setLineDash([]);
    },
    text(text, x, y, { size = 11, fill, align = "start", turn = 0, bold = false }) {
      context.save();
      context.translate(x, y);
      context.rotate((turn * Math.PI) / 180);
      context.font = `${bold ? "600 " : ""}${size}px ${FONT}`;
      context.fillStyle = fill;
      context.textAlign = ALIGN[align];
      context.textBaseline = "middle";
      context.fillText(text, 0, 0);
      context.restore();
    },
    cells(x, y, w, h, n, m, colour, { images, key }) {
      context.imageSmoothingEnabled = false;
      if (images.key !== key) Object.assign(images, { key, image: cellImage(n, m, colour) });
      context.drawImage(images.image, x, y, w, h);
    },
  };
}

// A canvas with one dot for each cell of an n × m matrix; `colour(i, j)` is [r, g, b].
export function cellImage(n, m, colour) {
  const canvas = document.createElement("canvas");
  canvas.width = m;
  canvas.height = n;
  const context = canvas.getContext("2d");
  const image = context.createImageData(m, n);
  for (let i = 0; i < n; i++)
    for (let j = 0; j < m; j++) {
      const [r, g, b] = colour(i, j);
      image.data.set([r, g, b, 255], 4 * (i * m + j));
    }
  context.putImageData(image, 0, 0);
  return canvas;
}

// A surface that collects SVG; `source()` returns the document.
export function svgSurface(width, height, title) {
  const parts = [];
  const round = (x) => Number(x.toFixed(2));
  const attributes = (values) =>
    Object.entries(values)
      .filter(([, value]) => value !== undefined)
      .map(([name, value]) => ` ${name}="${typeof value === "number" ? round(value) : escapeXml(value)}"`)
      .join("");
  return {
    rect(x, y, w, h, { fill = "none", stroke, thickness = 1 }) {
      const line = stroke ? { stroke, "stroke-width": thickness } : {};
      parts.push(`<rect${attributes({ x, y, width: w, height: h, fill, ...line })}/>`);
    },
    line(x1, y1, x2, y2, { stroke, dash }) {
      parts.push(`<line${attributes({ x1, y1, x2, y2, stroke, "stroke-dasharray": dash?.join(" ") })}/>`);
    },
    text(text, x, y, { size = 11, fill, align = "start", turn = 0, bold = false }) {
      const place = turn ? { transform: `translate(${round(x)} ${round(y)}) rotate(${turn})` } : { x, y };
      const style = { fill, "font-size": size, "text-anchor": align, "font-weight": bold ? "600" : undefined };
      parts.push(`<text dominant-baseline="central"${attributes({ ...place, ...style })}>${escapeXml(text)}</text>`);
    },
    cells(x, y, w, h, n, m, colour) {
      const cell = { width: w / m + 0.05, height: h / n + 0.05 }; // no seams between neighbours
      for (let i = 0; i < n; i++)
        for (let j = 0; j < m; j++) {
          const place = { x: x + (j * w) / m, y: y + (i * h) / n };
          parts.push(`<rect${attributes({ ...place, ...cell, fill: css(colour(i, j)) })}/>`);
        }
    },
    source() {
      const size = `width="${round(width)}" height="${round(height)}" viewBox="0 0 ${round(width)} ${round(height)}"`;
      const open = `<svg xmlns="http://www.w3.org/2000/svg" ${size} font-family="${escapeXml(FONT)}">`;
      return `${open}<title>${escapeXml(title)}</title>${parts.join("")}</svg>\n`;
    },
  };
}

// Text for XML 1.0, in which some characters cannot be written at all.
export function escapeXml(text) {
  const entities = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return text
    .replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f\ufffe\uffff]/g, "�")
    .replace(/[&<>"']/g, (c) => entities[c]);
}

const measuring = typeof document === "undefined" ? null : document.createElement("canvas").getContext("2d");

export function textWidth(text, size) {
  measuring.font = `${size}px ${FONT}`;
  return measuring.measureText(text).width;
}
