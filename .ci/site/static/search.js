// The search: sections, and rows of tables for them, ranked by BM25 over titles and text, with an excerpt; from sections.js.
const ALSO = {
  // a reader's word → what the pages say for it
  epsilon: ["ε", "eps"], eps: ["ε"], delta: ["Δ", "δ"], alpha: ["α"], beta: ["β"], learning: ["lr", "step"], rate: ["lr", "size"],
  resume: ["goes on", "go on"], continue: ["goes on", "resum"], restart: ["goes on", "resum"], early: ["patience"],
  dp: ["privacy"], differential: ["privacy"], seed: ["seeds"], hospital: ["site", "client"], worker: ["rank"],
  aggregation: ["means", "sum"], heterogeneity: ["skew", "dirichlet"], noniid: ["skew", "dirichlet"], strategy: ["method"],
  checkpointing: ["checkpoint"], install: ["pip"], offline: ["network"], docker: ["container"], singularity: ["apptainer"],
};
const TITLE = 6, PAGE = 3, LENGTH = 0.6, SATURATION = 1.2, FEWEST = 30;
// top-k, topk and lr_decay are words as a whole; their parts count too, but for hyphenated queries.
const WORD = /[\p{L}\p{N}]+(?:[-_.][\p{L}\p{N}]+)*/gu;
const whole = (word) => word.replace(/[-_.]/g, "");
const words = (text) => (text.toLowerCase().match(WORD) ?? []).flatMap((word) => {
  const parts = word.split(/[-_.]/);
  return parts.length > 1 ? [whole(word), ...parts] : parts;
});
const stem = (word) => word.length > 4 ? word.replace(/(ing|ed|es|e|s)$/, "").replace(/(.)\1$/, "$1") : word;

const counted = (text) => {
  const counts = new Map();
  for (const word of words(text)) counts.set(word, (counts.get(word) ?? 0) + 1);
  return counts;
};
const occurrences = (counts, wanted) => {
  let sum = counts.get(wanted) ?? 0;
  const root = stem(wanted);
  if (root.length > 2) for (const [word, n] of counts) if (word !== wanted && word.startsWith(root)) sum += n / 2;
  return sum;
};

function ranked(query) {
  const asked = [...new Set((query.toLowerCase().match(WORD) ?? []).map(whole))];
  const documents = SECTIONS.map(([, , page, heading, text]) => ({
    body: counted(text), heading: counted(heading), page: counted(page), text: text.toLowerCase(), head: heading.toLowerCase(),
  }));
  const mean = SECTIONS.reduce((sum, row) => sum + row[4].length, 0) / SECTIONS.length;
  const scores = SECTIONS.map(() => 0), matched = SECTIONS.map(() => 0);
  for (const word of asked) {
    const also = (ALSO[word] ?? ALSO[stem(word)] ?? []);
    const frequencies = documents.map(({ body, heading, page, text }, k) => {
      const inText = (one) => one.includes(" ") ? text.split(one).length - 1 : occurrences(body, one);
      const of = (one) => inText(one) + TITLE * occurrences(heading, one) + PAGE * Math.min(1, occurrences(page, one));
      return Math.max(of(word), ...also.map((one) => of(one) / 3));
    });
    const having = frequencies.filter((n) => n > 0).length;
    const weight = Math.log(1 + (SECTIONS.length - having + 0.5) / (having + 0.5));
    frequencies.forEach((n, k) => {
      if (!n) return;
      const size = 1 - LENGTH + LENGTH * Math.max(1, SECTIONS[k][4].length / mean);
      scores[k] += weight * n * (SATURATION + 1) / (n + SATURATION * size);
      matched[k] += 1;
    });
  }
  const complete = matched.filter((n) => n === asked.length).length > 4;  // fewer: sections with some of the words, too
  const phrase = query.toLowerCase().trim().replace(/\s+/g, " ");
  return SECTIONS.map((row, k) => {
    const { text, head } = documents[k];
    const near = asked.length > 1 ? (head.includes(phrase) ? 2 : text.includes(phrase) ? 1.5 : 1) : head === phrase ? 1.5 : 1;
    return { row, score: scores[k] * near * (matched[k] / asked.length) ** 3 * (row[5] ? 0.4 : 1) };
  }).filter(({ score }, k) => score > 0 && (!complete || matched[k] === asked.length)).sort((a, b) => b.score - a.score)
    .filter(((seen) => ({ row: [page, anchor] }) => !seen.has(page + anchor) && seen.add(page + anchor))(new Set()));
}

// The stretch of the text with most of the words asked for.
function excerpt(text, query) {
  const asked = (query.toLowerCase().match(WORD) ?? []).flatMap((word) => [stem(whole(word)), ...(ALSO[whole(word)] ?? [])]);
  const places = [...text.matchAll(WORD)].filter((found) => words(found[0]).some((word) => asked.some((one) => word.startsWith(one))));
  const within = (begin) => places.filter(({ index }) => index >= begin && index < begin + 180).length;
  const best = places.reduce((first, { index }) => within(index) > within(first) ? index : first, places[0]?.index ?? 0);
  const begin = Math.max(0, text.lastIndexOf(" ", Math.max(0, best - 40)) + 1);
  const end = text.indexOf(" ", begin + 220);
  return (begin ? "… " : "") + text.slice(begin, end < 0 ? undefined : end) + (end < 0 ? "" : " …");
}

const query = new URLSearchParams(location.search).get("q") ?? "";
document.querySelectorAll(".sidebar-search").forEach((input) => { input.value = query; });
const results = query.trim() ? ranked(query) : [];
document.querySelector(".found").textContent = !query.trim() ? "Type a word at the left."
  : results.length ? `${results.length} sections for “${query}”${results.length > FEWEST ? `, the first ${FEWEST}` : ""}`
  : `Nothing for “${query}”.`;
for (const { row: [page, anchor, title, heading, text] } of results.slice(0, FEWEST)) {
  const link = Object.assign(document.createElement("a"), {
    href: `${page}.html${anchor && `#${anchor}`}`, textContent: heading === title ? title : `${title} › ${heading}`,
  });
  const item = document.createElement("li");
  item.append(link, Object.assign(document.createElement("p"), { textContent: excerpt(text, query) }));
  document.querySelector(".results").append(item);
}
