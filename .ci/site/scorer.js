// The order of search results: pages that explain before records of measurements and changes.
const EXPLAINS = /^(README|docs\/(tour|own-project|recipe|methods|updates|api|clusters)|methods\/)/;
const RECORDS = /^(jobs\/|CHANGELOG|docs\/(reproduction|papers|index))/;
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([page, , , , score]) => score + (EXPLAINS.test(page) ? 2 : RECORDS.test(page) ? -4 : 0),
};
