// A browser gives a page from a file no other files to read, so search shows titles without excerpts there.
if (location.protocol === "file:" && typeof DOCUMENTATION_OPTIONS !== "undefined")
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
