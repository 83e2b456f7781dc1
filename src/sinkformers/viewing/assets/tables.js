// The tables behind the pictures: the same numbers for those who do not see the pictures.
import { isolated, table } from "./dom.js";
import { decimal, tokenLabels } from "./labels.js";
import { column, largest, row } from "./statistics.js";

const FEW = 3;

export function headTable(data, { head, result }) {
  const [rowLabels, columnLabels] = head.shape.map((size) => tokenLabels(data, size));
  const { n, m } = head;
  const named = (labels, ids, values) =>
    largest(values, FEW)
      .filter((place) => values[place] > 0)
      .map((place) => `${labels.full(ids[place])} ${decimal(values[place])}`)
      .join(", ");
  const given = head.rows.map((id, i) => [
    isolated(rowLabels.full(id)),
    decimal(result.entropies[i]),
    isolated(named(columnLabels, head.columns, row(result.weights, m, i))),
  ]);
  const received = head.columns.map((id, j) => [
    isolated(columnLabels.full(id)),
    decimal(result.sums[j]),
    isolated(named(rowLabels, head.rows, column(result.weights, n, m, j))),
  ]);
  const both = document.createElement("div");
  both.append(
    table("Keys: what each token receives", ["token", "column sum", "most from"], received),
    table("Queries: where each token looks", ["token", "entropy", "looks most at"], given),
  );
  return both;
}

export function overviewTable(cells) {
  const rows = cells.map(({ head, result }) => [
    `layer ${head.layer}, head ${head.number}`,
    result ? decimal(result.largestSum) : "…",
    result ? decimal(result.smallestSum) : "…",
    result ? decimal(result.entropy) : "…",
  ]);
  return table("All heads", ["head", "largest column sum", "smallest", "mean entropy"], rows);
}
