"use strict";
// Rank pages by the words of a question. Sphinx shows only pages that have every word, and counts each word alike.
// Here a rare word counts more than a frequent one, and a word in a title more than one in the text.
(() => {
  if (typeof Search === "undefined") return;
  const WEIGHT = { title: 7, keyword: 6, heading: 3, text: 1 };
  // Pages that hold nearly every word: found when nothing better is.
  const LISTS = /reference\/(flags|metrics|models|hooks|upstream_names|verl_parameters)|RESULTS|CHANGELOG|migration|STYLE|CONTRIBUTING|\/zh\//;
  const DEFINITION = /^what (is|are) (an? |the )?[\w-]+\??$/i; // of a word: the glossary has it
  const plain = Search._performSearch;
  const stemmer = new Stemmer();
  const stems = (text) => new Set(splitQuery(text.toLowerCase()).map((word) => stemmer.stemWord(word)));
  const files = (terms, word) => new Set(Object.hasOwn(terms, word) ? [terms[word]].flat() : []);
  let pages = null;

  const read = () => {
    const index = Search._index;
    pages = index.docnames.map((name, i) => ({
      title: stems(index.titles[i]),
      keyword: stems((typeof PAGE_KEYWORDS !== "undefined" && PAGE_KEYWORDS[name]) || ""),
      headings: [],
    }));
    for (const [title, places] of Object.entries(index.alltitles))
      for (const [file, id] of places) pages[file].headings.push({ title, id, words: stems(title) });
  };

  const score = (page, word, inText) => {
    if (page.title.has(word)) return WEIGHT.title;
    if (page.keyword.has(word)) return WEIGHT.keyword;
    if (page.headings.some((heading) => heading.words.has(word))) return WEIGHT.heading;
    return inText ? WEIGHT.text : 0;
  };

  const heading = (page, words) => {
    const count = (entry) => [...words].filter((word) => entry.words.has(word)).length;
    const none = { words: new Set(), title: null };
    return page.headings.reduce((best, next) => (count(next) > count(best) ? next : best), none);
  };

  Search._performSearch = (query, searchTerms, excludedTerms, highlightTerms, objectTerms) => {
    const index = Search._index;
    if (pages === null) read();
    const totals = new Array(index.docnames.length).fill(0);
    for (const word of searchTerms) {
      const inText = new Set([...files(index.terms, word), ...files(index.titleterms, word)]);
      const found = pages.map((page, i) => score(page, word, inText.has(i)));
      const rarity = Math.log(1 + pages.length / Math.max(1, found.filter((value) => value).length));
      const isMet = (value, i) => value <= WEIGHT.heading && LISTS.test(index.docnames[i]);
      found.forEach((value, i) => (totals[i] += rarity * value * (isMet(value, i) ? 0.3 : 1)));
    }
    if (DEFINITION.test(query)) totals[index.docnames.indexOf("docs/glossary")] *= 3;
    const best = Math.max(...totals);
    const ranked = totals
      .map((total, i) => ({ total, i }))
      .filter(({ total }) => total > 0 && total >= 0.2 * best)
      .sort((a, b) => a.total - b.total)
      .map(({ total, i }) => {
        const place = heading(pages[i], searchTerms);
        const own = place.title === null || place.title === index.titles[i];
        const shown = own ? index.titles[i] : `${index.titles[i]} > ${place.title}`;
        const anchor = own || place.id === null ? "" : "#" + place.id;
        return [index.docnames[i], shown, anchor, null, Math.round(total), index.filenames[i], SearchResultKind.text];
      });
    const isObject = (result) => result[6] === SearchResultKind.object;
    const objects = plain(query, searchTerms, excludedTerms, highlightTerms, objectTerms).filter(isObject);
    const isNamed = (result) => result[1].split(".").pop().toLowerCase() === query.trim().toLowerCase();
    // The last one is shown first.
    return [...objects.filter((r) => !isNamed(r)), ...ranked, ...objects.filter(isNamed)];
  };
})();
