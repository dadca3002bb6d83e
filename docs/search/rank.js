"use strict";
// Rank pages by the words of a question. Sphinx shows only pages that have every word, and counts each word alike.
// Here a rare word counts more than a frequent one, and a word in a title more than one in the text.
(() => {
  if (typeof Search === "undefined") return;
  const WEIGHT = { title: 7, keyword: 6, heading: 3, text: 1 };
  // Pages that hold nearly every word: found when nothing better is.
  const LISTS = /reference\/(flags|metrics|models|hooks|upstream_names|verl_parameters)|RESULTS|CHANGELOG|migration|STYLE|CONTRIBUTING|\/zh\//;
  // Words that questions have and answers do not turn on.
  const FILLER = new Set(
    ("how what when where which who why whose do does did doing done can could may might should shall would must will am been " +
      "has have had having i my mine me we our us you your they them he she its want wants need needs like get gets got getting " +
      "give make makes any some much many there here than from about while just only also very still even too please help way " +
      "possible able going up out off so all every each once").split(" ").map((word) => new Stemmer().stemWord(word)),
  );
  const EXAMPLE = /^examples\//;
  const CHINESE = /\p{Script=Han}{2,}/u; // has no spaces between words: pairs of characters are looked for
  const DEFINITION = /^what (is|are) (an? |the )?[\w-]+\??$/i; // of a word: the glossary has it
  const plain = Search._performSearch;
  const stemmer = new Stemmer();
  const stemsOf = (text) => splitQuery(text.toLowerCase()).map((word) => stemmer.stemWord(word));
  const stems = (text) => new Set(stemsOf(text));
  const files = (terms, word) => new Set(Object.hasOwn(terms, word) ? [terms[word]].flat() : []);
  const pairs = (word) => [...word].slice(1).map((character, i) => [...word][i] + character);
  const isIn = (words, word) => words.has(word) || (CHINESE.test(word) && [...words].some((other) => other.includes(word)));
  const filesWith = (terms, word) =>
    CHINESE.test(word)
      ? Object.keys(terms).filter((other) => other.includes(word)).flatMap((other) => [...files(terms, other)])
      : files(terms, word);
  let pages = null;

  const read = () => {
    const index = Search._index;
    pages = index.docnames.map((name, i) => ({
      title: stems(index.titles[i]),
      keyword: stems((typeof PAGE_KEYWORDS !== "undefined" && PAGE_KEYWORDS[name]) || ""),
      headings: [],
    }));
    for (const [title, places] of Object.entries(index.alltitles))
      for (const [file, id] of places) pages[file].headings.push({ title, id, words: stems(title), text: ` ${stemsOf(title).join(" ")} ` });
  };

  const score = (page, word, inText) => {
    if (isIn(page.title, word)) return WEIGHT.title;
    if (page.keyword.has(word)) return WEIGHT.keyword;
    if (page.headings.some((heading) => isIn(heading.words, word))) return WEIGHT.heading;
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
    const covered = new Array(index.docnames.length).fill(0);
    const telling = [...searchTerms].filter((word) => !FILLER.has(word));
    const words = (telling.length ? telling : [...searchTerms]).flatMap((word) => (CHINESE.test(word) ? pairs(word) : [word]));
    for (const word of words) {
      const inText = new Set([index.terms, index.titleterms].flatMap((terms) => [...filesWith(terms, word)]));
      const found = pages.map((page, i) => score(page, word, inText.has(i)));
      const rarity = Math.log(1 + pages.length / Math.max(1, found.filter((value) => value).length));
      found.forEach((value, i) => (covered[i] += value ? 1 : 0));
      const isMet = (value, i) => value <= WEIGHT.heading && LISTS.test(index.docnames[i]);
      found.forEach((value, i) => (totals[i] += rarity * value * (isMet(value, i) ? 0.3 : 1)));
    }
    // Three words as they stand in a heading: "how many rollouts" asks for more than "rollout".
    const asked = stemsOf(query);
    const triples = asked.slice(2).map((word, i) => ` ${asked[i]} ${asked[i + 1]} ${word} `);
    totals.forEach((total, i) => {
      const count = (heading) => triples.filter((triple) => heading.text.includes(triple)).length;
      totals[i] += 2 * Math.max(0, ...pages[i].headings.map(count));
    });
    // A page about an example answers fewer questions; one that has all the words answers more.
    totals.forEach((total, i) => {
      totals[i] = total * (EXAMPLE.test(index.docnames[i]) ? 0.6 : 1) * (1 + covered[i] / words.length);
    });
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
