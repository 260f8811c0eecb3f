// Plays a recorded run, one frame per event. `data` is what walkvllm.player made of the run: its requests, and for each
// frame what has changed since the one before. No dependencies. This file is an anywidget module; on a page without a
// kernel the same text stands in the output, and the model is a plain object.

const STYLE = `
:host { display: block; container-type: inline-size; max-width: 1000px; color: inherit; text-align: left }
* { box-sizing: border-box }
.player {
  --paper: var(--color-background-primary, var(--jp-layout-color0, var(--vscode-editor-background, Canvas)));
  --ink: var(--color-foreground-primary, var(--jp-ui-font-color1, var(--vscode-editor-foreground, CanvasText)));
  --line: color-mix(in srgb, currentColor 24%, transparent);
  --wash: color-mix(in srgb, currentColor 5%, transparent);
  --mute: color-mix(in srgb, currentColor 74%, transparent);
  font: 13px/1.45 system-ui, sans-serif; font-variant-numeric: tabular-nums; padding: 2px; border-radius: 6px }
.mute { color: var(--mute); font-weight: 400 }
a { color: inherit }
.keep { display: grid }
.keep > * { grid-area: 1 / 1; min-width: 0 }
.size { visibility: hidden }
.title { font-weight: 600; font-size: 14px; margin: 0 0 6px }
.hear { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%) }
[data-r].dim { opacity: .28 }

/* the route */
.route { display: grid; grid-template-columns: repeat(12, minmax(0, 1fr)); text-align: center }
.lane { grid-column: 1 / -1; background: var(--wash); border-radius: 8px }
.tag { align-self: center; color: var(--mute); font-size: 11px; line-height: 1.25; z-index: 1 }
.stop { position: relative; display: flex; flex-direction: column; align-items: center; padding: 5px 0;
  text-decoration: none; font-size: 11px; line-height: 1.15 }
.stop b { width: 26px; height: 26px; border: 1px solid var(--line); border-radius: 50%; background: var(--paper);
  font: 600 11px/24px system-ui, sans-serif; z-index: 1 }
.stop em { font-style: normal; color: var(--mute); min-height: 2.3em; padding: 2px 1px 0 }
.stop.beside b { border: 2px solid currentColor; line-height: 22px }
.stop.here b { background: currentColor; border-color: currentColor }
.stop.here b span { color: var(--paper) }
.stop.here em { color: inherit; font-weight: 600 }
.stop.up { flex-direction: column-reverse; justify-content: flex-start }
.stop.up em { min-height: 0; padding: 0 0 3px }
.stop::before { content: ''; position: absolute; left: -50%; top: 30px; width: 100%; height: 2px; background: var(--line) }
.stop.up::before { top: auto; bottom: 29px }
.stop.first::before { display: none }
.stop.cross { padding: 3px 0 }
.stop.cross::before { left: calc(50% - 1px); width: 2px; height: auto; top: -30px; bottom: -32px }
.dots { display: flex; gap: 2px; justify-content: center; height: 12px; z-index: 2 }
.dots i { width: 11px; height: 11px; border-radius: 50%; background: var(--c); border: 1px solid var(--paper) }
.cross .dots { position: absolute; left: calc(50% + 15px); top: 10px }
.away .dots { left: auto; right: calc(50% + 15px) }
.mail { align-self: center; text-align: left; padding-left: 10px; font-size: 12px; white-space: nowrap;
  z-index: 1; animation: slide .35s }
.mail.back { text-align: right; padding: 0 56px 0 0 }

/* what is said */
.said { margin: 10px 0 8px }
.when { font-weight: 600; font-size: 15px; margin-bottom: 3px }
.when .mute { font-size: 13px; margin-left: 4px }
.said p { margin: 0; display: grid; grid-template-columns: 112px minmax(0, 1fr); overflow-wrap: anywhere }
.said p > .mute { font-size: 12px; line-height: 19px }
.said em { font-style: normal }

/* panels */
.views { display: grid; gap: 12px 26px }
.panels { display: grid; grid-template-columns: minmax(0, 5fr) minmax(0, 6fr); gap: 10px; margin-top: 10px }
.panel { border: 1px solid var(--line); border-radius: 8px; padding: 7px 10px 9px; min-width: 0 }
.panel.wide { grid-column: 1 / -1 }
h4 { font: 600 12px/1.4 system-ui, sans-serif; margin: 0 0 5px; display: flex; gap: 8px; justify-content: space-between }
.pill { display: inline-block; border-radius: 9px; padding: 0 8px; margin: 0 4px 4px 0; background: var(--c); color: #fff;
  font-size: 12px; line-height: 18px; white-space: pre; max-width: 100%; overflow: hidden; text-overflow: ellipsis;
  vertical-align: top }
.queue { margin-bottom: 2px; display: grid; grid-template-columns: 70px minmax(0, 1fr); min-height: 23px }
.bar { display: flex; height: 26px; border: 1px solid var(--line); border-radius: 5px; overflow: hidden; margin-bottom: 6px }
.bar i { font-style: normal; font-size: 12px; line-height: 25px; text-align: center; overflow: hidden; color: #fff;
  background: var(--c); border-right: 1px solid var(--paper) }
.bar i:last-child { border: 0 }
.bar i.pale { background: color-mix(in srgb, var(--c) 42%, transparent); color: inherit }
.list { display: flex; flex-wrap: wrap; gap: 0 12px }
.list > span { white-space: nowrap; max-width: 100%; overflow: hidden; text-overflow: ellipsis }
.list u { display: inline-block; width: 9px; height: 9px; border-radius: 2px; background: var(--c); margin-right: 4px }
.row { display: grid; grid-template-columns: repeat(auto-fill, minmax(40px, 1fr)); gap: 2px }
.row > .mute { grid-column: 1 / -1 }
.tok { border-radius: 3px; padding: 2px 0; background: var(--c); color: #fff; font: 11.5px/1.25 system-ui, sans-serif;
  text-align: center; white-space: pre; overflow: hidden; text-overflow: ellipsis }
.tok small { display: block; font-size: 10px }
.tok.ghost { background: none; border: 1px dashed var(--c); color: inherit; padding: 1px 0 }
.tok.first { box-shadow: inset 2px 0 0 #fff }
.tiny { grid-template-columns: repeat(auto-fill, 9px) }
.tiny .tok { height: 16px; padding: 0; font-size: 0 }
.tiny small { display: none }
.out { margin-top: 6px; min-height: 22px }
.out .pill { animation: pop .3s }
.pool { display: grid; grid-template-columns: repeat(auto-fill, minmax(23px, 1fr)); gap: 3px }
.b { position: relative; height: 26px; border: 1px solid var(--line); border-radius: 4px; overflow: hidden;
  font: 11px/25px system-ui, sans-serif; text-align: center; color: var(--mute) }
.b.held { color: #fff; border-color: transparent }
.b.kept { background: repeating-linear-gradient(135deg, var(--line) 0 1.5px, transparent 1.5px 7px) }
.b.new { animation: pop .35s; outline: 2px solid var(--ink); outline-offset: 1px }
.b.back { border: 2px dashed currentColor; line-height: 23px }
.many { grid-template-columns: repeat(auto-fill, 10px); gap: 2px }
.many .b { height: 12px; font-size: 0 }
.req { display: grid; grid-template-columns: 126px minmax(0, 1fr) minmax(0, 250px); gap: 4px 12px; padding: 6px 0;
  border-top: 1px solid var(--line) }
.req:first-child { border: 0; padding-top: 0 }
.req:last-child { padding-bottom: 0 }
.long { max-height: 480px; overflow-y: auto }
.who { min-height: 42px }
.who .mute { display: block; font-size: 12px; line-height: 1.3 }
.text { overflow-wrap: anywhere; white-space: pre-wrap }
.text q { quotes: none; color: var(--mute) }
.text s { text-decoration: none; opacity: .5 }
mark { background: color-mix(in srgb, var(--c) 35%, transparent); color: inherit; border-radius: 2px }
.table { min-height: 26px; display: flex; flex-wrap: wrap; gap: 3px; align-content: flex-start }
.table .b { width: 28px; color: inherit; border-color: var(--c);
  background: linear-gradient(0deg, color-mix(in srgb, var(--c) 50%, transparent) var(--f), transparent var(--f)) }
.big .row { grid-template-columns: repeat(auto-fill, minmax(50px, 1fr)) }
.big .tok { font-size: 12.5px }
.big .tok small { font-size: 11px }
.big .pool { grid-template-columns: repeat(auto-fill, minmax(40px, 1fr)) }
.big .pool .b { height: 36px; font: 13px/34px system-ui, sans-serif }
.big .bar { height: 34px }
.big .bar i { font-size: 14px; line-height: 33px }

/* controls */
.control > .mute { font-size: 12px; margin: 4px 8px -6px }
.control + .views { margin-top: 14px }
.steer { display: flex; flex-wrap: wrap; gap: 6px 12px; align-items: center; margin-top: 6px }
.steer > div { display: flex; flex-wrap: wrap; gap: 4px; align-items: center }
button, select { min-height: 32px; min-width: 34px; padding: 0 9px; border: 1px solid var(--line); border-radius: 6px;
  background: var(--wash); color: inherit; font: 13px/1 system-ui, sans-serif; cursor: pointer }
select { background: var(--paper); max-width: 220px }
button:hover { background: var(--line) }
button:disabled { opacity: .4; cursor: default }
button svg { width: 13px; height: 13px; fill: currentColor; display: block; margin: auto }
button[data-do=play] { background: currentColor; min-width: 44px }
button[data-do=play] svg { fill: var(--paper) }
.chip { max-width: 100%; overflow: hidden; text-overflow: ellipsis; border: 2px solid var(--c); border-radius: 16px; background: none }
.chip[aria-pressed=true] { background: var(--c); color: #fff }
:focus-visible { outline: 2px solid var(--color-brand-primary, var(--jp-brand-color1, Highlight)); outline-offset: 2px }
.shape { display: block; width: calc(100% - 16px); height: 34px; margin: 8px 8px 0; overflow: visible; cursor: pointer }
.slide { display: block; height: 22px; margin: 1px 0 0; appearance: none; background: none; color: inherit; cursor: pointer }
.slide::-webkit-slider-runnable-track { height: 4px; border-radius: 2px; background: var(--line) }
.slide::-moz-range-track { height: 4px; border-radius: 2px; background: var(--line) }
.slide::-webkit-slider-thumb { appearance: none; width: 16px; height: 16px; margin-top: -6px; border-radius: 50%;
  background: currentColor }
.slide::-moz-range-thumb { width: 16px; height: 16px; border: 0; border-radius: 50%; background: currentColor }
.detail { min-height: 20px; margin-top: 6px; font-size: 12px; color: var(--mute); overflow-wrap: anywhere }

@keyframes pop { from { transform: scale(.6); opacity: .2 } }
@keyframes slide { from { transform: translateY(-8px); opacity: 0 } }
@media (prefers-reduced-motion: reduce) { * { animation: none !important } }
@container (min-width: 860px) {
  .two { grid-template-columns: minmax(0, 1fr) minmax(0, 1fr) }
  .two .panels, .two .req { grid-template-columns: minmax(0, 1fr) }
  .two .said p { grid-template-columns: 26px minmax(0, 1fr) }
  .two em { display: none } }
@container (max-width: 620px) {
  .panels, .req { grid-template-columns: minmax(0, 1fr) }
  .stop b { width: 24px; height: 24px; line-height: 22px }
  .stop::before { top: 29px }
  .when .mute { display: block; margin: 0 }
  .said p { grid-template-columns: 26px minmax(0, 1fr) }
  .stop em, .said em { display: none }
  .big .row { grid-template-columns: repeat(auto-fill, minmax(40px, 1fr)) }
  .big .tok { font-size: 11.5px }
  .big .tok small { font-size: 10px } }`;

const ABOUT = {
  'input processed': 'a prompt becomes token ids', 'message encoded': 'and a message for the core',
  'message sent': 'it is on its way', 'message decoded': 'the core reads it', added: 'the core puts it into its queue',
  scheduled: 'the scheduler spends the budget', executed: 'the model runs once, on one row of tokens',
  sampled: 'a token for every prompt that is complete', updated: 'tokens are counted, blocks come back',
  'outputs encoded': 'a message for the caller', 'outputs decoded': 'the caller reads it',
  'text out': 'tokens become text', taken: 'the answer is handed to whoever asked', aborted: 'a request is dropped',
  'prefix cache reset': 'what blocks held is forgotten', 'blocks home': 'every block is accounted for',
};
const ICONS = {
  first: 'M2 2h2v12H2zM14 2v12L5 8z', back: 'M10 1.6L11.4 3l-5 5 5 5-1.4 1.4L3.6 8z', play: 'M3 1l11 7-11 7z',
  pause: 'M3 2h4v12H3zM9 2h4v12H9z', step: 'M6 1.6L4.6 3l5 5-5 5L6 14.4 12.4 8z', last: 'M12 2h2v12h-2zM2 2v12l9-6z',
};
const BUTTONS = {
  first: 'first event (Home)', back: 'one event back (left arrow)', play: 'play (space)', step: 'one event on (right arrow)',
  last: 'last event (End)',
};
const KEYS = { ' ': 'play', ArrowLeft: 'back', ArrowRight: 'step', Home: 'first', End: 'last', n: 'next', p: 'before' };

const esc = text => String(text).replace(/[&<>"]/g, c => ({ '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;' })[c]);
const shown = text => esc(text).replaceAll('\n', '↵');
const tip = text => `title="${shown(text)}"`;
const count = (n, what) => `${n} ${what}${n === 1 ? '' : 's'}`;
const icon = name => `<svg viewBox="0 0 16 16" aria-hidden="true"><path d="${ICONS[name]}"/></svg>`;
const muted = text => `<span class="mute">${text}</span>`;

// ---- what is there after frame i ----

function apply(state, changes) {
  for (const [key, value] of Object.entries(changes)) if (value === null) delete state[key]; else state[key] = value;
  return state;
}

const stateAt = (run, i) => run.frames.slice(0, i + 1).reduce((state, frame) => apply(state, frame.d), {});

// ---- panels: each draws one part of a state `s` as HTML, and of the frame that led there ----

const of = (run, r, style = '') => `data-r="${r}" style="--c:${run.requests[r].colour};${style}"`;
const name = (run, r) => run.requests[r].name;
const pill = (run, r, text, more = '') => `<span class="pill" ${of(run, r)} ${more}>${shown(text ?? name(run, r))}</span>`;
const kind = decode => (decode ? 'decode' : 'prefill');

function queues(run, s) {
  const line = (what, list = [], total) => `<div class="queue">${muted(what)}<div>${list.map(r => pill(run, r)).join('')
    || muted('nobody')}${total > list.length ? ` +${total - list.length}` : ''}</div></div>`;
  return line('waiting', s.waiting, s.num_waiting) + line('running', s.running);
}

function budget(run, s) {
  const b = s.budget;
  if (!b) return `<div class="bar"></div>${muted(`no step yet; each may compute ${run.engine.max_num_batched_tokens} tokens`)}`;
  const bars = b.spent.map(([r, n, decode]) => `<i ${of(run, r, `width:${100 * n / b.budget}%`)} class="${decode ? 'pale' : ''}"
    ${tip(`${name(run, r)}: ${count(n, 'token')} of ${b.budget}, ${kind(decode)}`)}>${n}</i>`);
  const list = b.spent.map(([r, n, decode]) => `<span ${of(run, r)}><u></u>${esc(name(run, r))} ${n} ${kind(decode)}</span>`);
  const why = b.why === 'nobody waits' ? '; nobody waits' : b.why ? `; no one else let in: ${b.why}` : '';
  return `<div class="bar">${bars.join('')}</div><div class="list">${list.join('')}${muted(`${b.left} left${esc(why)}`)}</div>`;
}

function row(run, s) {
  const planned = s.budget?.spent || [], tiny = planned.reduce((sum, [, n]) => sum + n, 0) > 64 ? ' tiny' : '';
  let place = 0, tokens;
  if (s.row) tokens = s.row.flatMap(([r, first, slots]) => slots.map((slot, k) => {
    const word = run.requests[r].words[first + k] ?? '?';
    const says = `${name(run, r)}: "${word}", token ${place++} of the row; position ${first + k} is written to slot ${slot}`;
    return `<div class="tok${k ? '' : ' first'}" ${of(run, r)} ${tip(says)}>${shown(word.trim() || word)}<small>${
      first + k}→${slot < 0 ? '–' : slot}</small></div>`;
  }));
  else tokens = planned.flatMap(([r, n]) => Array(n).fill(`<div class="tok ghost" ${of(run, r)}> <small> </small></div>`));
  return `<div class="row${tiny}">${tokens.join('') || muted('no step yet')}</div>${run.only ? '' : sampled(run, s)}`;
}

function sampled(run, s) {
  const drawn = (s.sampled || []).map(([r, id, word]) =>
    pill(run, r, word || id, tip(`${name(run, r)}: token ${id}, "${word}"`)) + muted(`${id}&ensp;`));
  const none = muted(s.sampled ? 'nothing: no prompt is complete' : 'not yet');
  return `<div class="out">${run.only ? '' : muted('sampled&ensp;')}${drawn.join('') || none}</div>`;
}

function pool(run, s) {
  const owners = {}, kept = new Set(s.remembered), taken = new Set(s.taken), back = new Set(s.back), size = run.engine.block_size;
  run.requests.forEach((_, r) => (s[`held.${r}`] || []).forEach(id => (owners[id] ||= []).push(r)));
  let html = '';
  for (let id = 1; id < run.engine.num_blocks; id++) {
    const who = owners[id] || [], part = 100 / who.length;
    const stripes = who.map((r, k) => `${run.requests[r].colour} ${part * k}% ${part * (k + 1)}%`);
    const look = who.length ? 'held' : kept.has(id) ? 'kept' : '';
    const free = kept.has(id) ? 'free, but what it holds is remembered' : 'free';
    const says = who.length ? `held by ${who.map(r => name(run, r)).join(', ')}` : free;
    html += `<div class="b ${look}${taken.has(id) ? ' new' : ''}${back.has(id) ? ' back' : ''}" data-r="${who.join(' ')}"
      ${who.length ? `style="background:linear-gradient(90deg,${stripes})"` : ''}
      ${tip(`block ${id}: ${says}; slots ${id * size} to ${id * size + size - 1}`)}>${id}</div>`;
  }
  return `<div class="pool${run.engine.num_blocks > 130 ? ' many' : ''}">${html}</div>`;
}

function table(run, s, r) {
  const size = run.engine.block_size, done = s[`computed.${r}`] || 0;
  const blocks = (s[`held.${r}`] || []).map((id, k) => {
    const full = Math.max(0, Math.min(size, done - k * size)), from = k * size;
    const says = `${name(run, r)}: positions ${from} to ${from + size - 1} are in block ${id}, ${full} of ${size} written`;
    return `<div class="b" ${of(run, r, `--f:${100 * full / size}%`)} ${tip(says)}>${id}</div>`;
  });
  return `<div class="table">${blocks.join('')}</div>`;
}

const tables = (run, s) => run.requests.map((_, r) =>
  `<div class="queue"><div>${pill(run, r)}</div>${table(run, s, r)}</div>`).join('');

function status(run, s, r) {
  const { prompt, max } = run.requests[r], made = s[`made.${r}`] || 0;
  if (s[`done.${r}`]) return `finished: ${s[`done.${r}`]}`;
  if (s[`at.${r}`] === undefined) return 'not here yet';
  if (s.waiting?.includes(r)) return made ? `preempted, has ${made} of ${max}` : 'waiting';
  if (!s.running?.includes(r) && !made) return count(prompt, 'token');
  return made ? `writing: ${made} of ${max ?? '?'}` : `prompt: ${s[`computed.${r}`] || 0} of ${prompt}`;
}

function text(run, s, r) { // prompt that is computed, computed in this step, and not yet; answer; what was sampled this moment
  const { words, prompt } = run.requests[r], part = (a, b) => shown(words.slice(a, b).join(''));
  if (s[`at.${r}`] === undefined) return '';
  const done = Math.min(prompt, s[`computed.${r}`] || 0), from = Math.min(done, s.row?.find(x => x[0] === r)?.[1] ?? done);
  const next = s.shown?.includes(r) ? null : s.sampled?.find(x => x[0] === r);
  return `<q>${part(0, from)}</q><mark>${part(from, done)}</mark><s>${part(done, prompt)}</s>${shown(s[`text.${r}`] || '')}${
    next ? `<mark>${shown(next[2])}</mark>` : ''}`;
}

const requests = (run, s) => run.requests.map((q, r) => `<div class="req" ${of(run, r)}>
  <div class="who">${pill(run, r)}${muted(esc(status(run, s, r)))}</div>
  <div class="keep"><div class="text">${text(run, s, r)}</div>
  <div class="text size" aria-hidden="true">${shown(q.words.slice(0, q.far).join(''))}</div></div>
  ${table(run, s, r)}</div>`).join('');

function prompt(run, s, frame) {
  return frame.w.map(r => `<div class="row">${run.requests[r].words.slice(0, run.requests[r].prompt).map((word, k) =>
    `<div class="tok" ${of(run, r)} ${tip(`${name(run, r)}: position ${k}, "${word}", id ${run.requests[r].ids[k]}`)}>${
      shown(word.trim() || word)}<small>${run.requests[r].ids[k]}</small></div>`).join('')}</div>`).join('');
}

const settings = run => `<div class="list">${Object.entries(run.engine).map(([key, value]) =>
  `<span>${muted(esc(key))} ${esc(value)}</span>`).join('')}</div>`;

const numTokens = list => (list || []).reduce((n, [, , slots]) => n + slots.length, 0);
const numHeld = s => Object.keys(s).reduce((n, key) => n + (key.startsWith('held.') ? s[key].length : 0), 0);
const numFree = (s, run) => `${s.free ?? run.engine.num_blocks - 1} of ${run.engine.num_blocks - 1} free`;
const PANELS = { // name -> title, drawing, what stands at the right of the title, how large the drawing of a state is
  queues: ['Queues', queues, () => '', s => (s.waiting?.length || 0) + (s.running?.length || 0)],
  budget: ['Token budget of the step', budget, (s, run) => count(run.engine.max_num_batched_tokens, 'token'),
    s => JSON.stringify(s.budget || '').length],
  row: ['One row of tokens for the model', row, () => 'position → slot', s => numTokens(s.row)],
  sampled: ['Sampled', sampled, () => '', s => s.sampled?.length || 0],
  pool: ['Pool of KV blocks', pool, numFree, () => 0],
  tables: ['Block tables', tables, () => 'filled as far as written', numHeld],
  requests: ['Requests', requests, () => 'prompt, answer, block table', () => 0],
  prompt: ['The prompt', prompt, () => 'token and its id',
    (s, frame, run) => Math.max(...frame.w.map(r => run.requests[r].prompt))],
  settings: ['Settings', settings, () => '', () => 0],
};

// ---- the route: the caller's side above, the engine core below ----

function stop(run, s, frame, hrefs, page, area, way = '') {
  const cross = page === '04', out = way === 'cross away'; // who has a token crosses on the way out
  const title = `${page} ${run.stops[page]}${out ? ', on the way out' : ''}`, here = run.requests.map((_, r) => r)
    .filter(r => s[`at.${r}`] === page && !(cross && out !== Boolean(s[`made.${r}`])));
  const lit = cross && s.message?.down === out ? '' : frame.p === page ? 'here' : frame.say.some(([where]) => where.startsWith(page)) ? 'beside' : '';
  const dots = here.slice(0, 4).map(r => `<i ${of(run, r)} ${tip(`${name(run, r)} was last seen at stop ${title}`)}></i>`);
  return `<a class="stop ${way} ${lit}${['01', '05', '15'].includes(page) ? ' first' : ''}" style="grid-area:${area}"
    ${hrefs[page] ? `href="${esc(hrefs[page])}" data-to="${page}"` : ''} ${lit === 'here' ? 'aria-current="step"' : ''}
    ${tip(`stop ${title}`)} aria-label="stop ${title}${here.map(r => `, ${esc(name(run, r))}`).join('')}">
    <span class="dots">${dots.join('')}</span><b><span>${page}</span></b>${cross ? '' : `<em>${run.stops[page]}</em>`}</a>`;
}

function route(run, s, frame, hrefs) {
  const at = (page, area, way) => stop(run, s, frame, hrefs, page, area, way), m = s.message;
  const bytes = m?.bytes ? `, ${count(m.bytes, 'byte')}` : '', mail = m ? (m.down ? `↓ ${m.what}${bytes}` : `${m.what}${bytes} ↑`) : '';
  const above = [at('01', '1/1', 'up'), at('02', '1/2', 'up'), at('03', '1/3', 'up'), at('15', '1/12', 'up')];
  const below = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14].map(n => at(String(n).padStart(2, '0'), `3/${n - 2}`));
  return `<nav class="route" aria-label="The route, with the requests on it">
    <div class="lane" style="grid-row:1"></div><div class="lane" style="grid-row:3"></div>${above.join('')}
    <span class="tag" style="grid-area:1/4/2/12">the caller’s ${run.engine.multiprocess ? 'process' : 'side'}</span>${at('04', '2/3', 'cross')}
    <span class="mail${m && !m.down ? ' back' : ''}" style="grid-area:2/4/3/12">${mail}</span>${at('04', '2/12', 'cross away')}
    <span class="tag" style="grid-area:3/1/4/3">engine core<br>${s.step ? `step ${s.step}` : ''}</span>${below.join('')}</nav>`;
}

// ---- one run ----

const when = frame => `${frame.s ? `Step ${frame.s}` : 'On the way in'}: ${frame.n}`;
const aloud = frame => `${when(frame)}. ${frame.say.map(([page, sentence]) => `${page.slice(3)}: ${sentence}`).join('. ')}`;
const said = frame => `<div class="when">${when(frame)} ${muted(ABOUT[frame.n] || '')}</div>${frame.say.map(([page, sentence]) =>
  `<p><span class="mute">${page.slice(0, 2)}<em>${esc(page.slice(2))}</em></span><span>${shown(sentence)}</span></p>`).join('')}`;
const longest = (items, size) => items.reduce((a, b) => (size(b) > size(a) ? b : a));

function view(run, hrefs) {
  const el = document.createElement('div'), place = {}, largest = {}, state = {};
  const kept = key => `<div class="keep"><div data-p="${key}"></div><div class="size" aria-hidden="true"></div></div>`;
  const wide = key => (run.only || key === 'requests' ? ' wide' : '') + (run.requests.length > 8 ? ' long' : '');
  el.className = run.only ? 'big' : '';
  const panels = run.panels.map(key => `<div class="panel${wide(key)}" tabindex="0" role="group" aria-label="${PANELS[key][0]}">
    <h4>${PANELS[key][0]}<span class="mute" data-p="${key} right"></span></h4>${kept(key)}</div>`);
  el.innerHTML = `${run.title ? `<div class="title">${esc(run.title)}</div>` : ''}<div data-p="route"></div>
    <div class="said">${kept('said')}</div><div data-p="steer"></div><div class="panels">${panels.join('')}</div>`;
  for (const e of el.querySelectorAll('[data-p]')) place[e.dataset.p] = e;
  // each place is as large as its largest drawing, so that nothing jumps while the run plays
  place.said.nextSibling.innerHTML = said(longest(run.frames, frame => aloud(frame).length + 90 * frame.say.length));
  for (const frame of run.frames) {
    apply(state, frame.d);
    for (const key of run.panels) {
      const size = PANELS[key][3](state, frame, run);
      if (!(largest[key]?.size >= size)) largest[key] = { size, frame, state: { ...state } };
    }
  }
  run.requests.forEach((q, r) => { q.far = q.prompt + (state[`made.${r}`] || 0); });
  for (const key of run.panels) place[key].nextSibling.innerHTML = PANELS[key][1](run, largest[key].state, largest[key].frame);
  el.draw = i => {
    const s = stateAt(run, i), frame = run.frames[i];
    if (run.route) place.route.innerHTML = route(run, s, frame, hrefs);
    place.said.innerHTML = said(frame);
    for (const key of run.panels) {
      place[key].innerHTML = PANELS[key][1](run, s, frame);
      place[`${key} right`].textContent = PANELS[key][2](s, run);
    }
  };
  return el;
}

function shape(run, moments, k) { // a column for each step, as high as the tokens that it computed
  const columns = [], end = moments.length;
  let spent = [], top = 0;
  moments.forEach((moment, x) => {
    const frame = run.frames[moment[k]];
    spent = frame.d.budget?.spent || spent;
    if (frame.s > top) columns.push({ step: top = frame.s, from: x, spent });
  });
  const bars = columns.map(({ step, from, spent }, i) => {
    const to = columns[i + 1]?.from ?? end;
    const gap = Math.min(.3, .12 * (to - from)), each = spent.map(([r, n, decode]) => `${esc(name(run, r))} ${n} ${kind(decode)}`);
    let y = 34;
    return `<g>${spent.map(([r, n, decode]) => {
      const height = 32 * n / run.engine.max_num_batched_tokens;
      return `<rect data-r="${r}" x="${from + gap / 2}" y="${y -= height}" width="${to - from - gap}" height="${height}"
        fill="${run.requests[r].colour}" fill-opacity="${decode ? .7 : 1}"/>`;
    }).join('')}<title>step ${step}: ${each.join(', ')}</title></g>`;
  });
  if (!bars.length) return '';
  return `<svg class="shape" aria-hidden="true" viewBox="0 0 ${end} 34" preserveAspectRatio="none">${bars.join('')}
    <path d="M0 34H${end}" stroke="currentColor" stroke-opacity=".35" vector-effect="non-scaling-stroke"/>
    <path class="cursor" stroke="currentColor" stroke-width="2" vector-effect="non-scaling-stroke"/></svg>`;
}

// ---- the player ----

function controls(runs, moments, names, colour) {
  const n = moments.length - 1, button = (key, what, inside) =>
    `<button data-do="${key}" aria-label="${what}" title="${what}">${inside}</button>`;
  const shapes = runs.map((run, k) => (run.title ? `<div class="mute">${esc(run.title)}</div>` : '') + shape(run, moments, k));
  const chips = names.length > 12 ? [`<select class="pick" aria-label="follow a request"><option value="">nobody</option>${
    names.map(who => `<option value="${esc(who)}">${shown(who)}</option>`).join('')}</select>`] : names.map(who =>
    `<button class="chip" data-name="${esc(who)}" aria-pressed="false" style="--c:${colour(who)}">${esc(who)}</button>`);
  const inset = `width:calc((100% - 16px) * ${n / (n + 1)} + 16px);margin-left:calc((100% - 16px) * ${.5 / (n + 1)})`;
  const speeds = [.5, 1, 2, 4].map(v => `<option value="${v}"${v === 1 ? ' selected' : ''}>${v}×</option>`);
  return `<div class="control">${shapes.join('')}
    <input class="slide" type="range" min="0" max="${n}" aria-label="event" style="${inset}"><div class="steer">
    <div>${Object.entries(BUTTONS).map(([key, what]) => button(key, what, icon(key))).join('')}
    <select aria-label="speed" title="speed">${speeds.join('')}</select></div>
    <div role="group" aria-label="follow a request">${muted('follow')}${chips.join('')}
    ${button('before', 'the event of this request before (p)', 'before')}${button('next', 'the next event of this request (n)', 'next')}</div>
    <span class="mute place"></span></div></div>`;
}

function render({ model, el }) {
  const { runs, moments, label } = model.get('data'), n = moments.length - 1, hrefs = {};
  for (const a of el.querySelectorAll('a[data-stop]')) hrefs[a.dataset.stop] = a.getAttribute('href');
  el.querySelector(':scope > .still')?.setAttribute('hidden', '');
  const host = el.appendChild(document.createElement('div')), root = host.attachShadow({ mode: 'open' });
  host.dataset.lmSuppressShortcuts = 'true'; // keys that are pressed in here are no commands of JupyterLab
  const names = [...new Set(runs.flatMap(run => run.requests.map(q => q.name)))];
  const colour = who => runs.flatMap(run => run.requests).find(q => q.name === who).colour;
  root.innerHTML = `<style>${STYLE}</style>
    <div class="player" tabindex="0" role="group" aria-roledescription="player" aria-label="${esc(label)}">
    ${controls(runs, moments, names, colour)}<div class="views${runs.length > 1 ? ' two' : ''}"></div>
    <div class="detail">Hover over anything, or tap it, for its numbers.</div><div class="hear" aria-live="polite"></div></div>`;
  const $ = what => root.querySelector(what), player = $('.player'), slide = $('.slide');
  const views = runs.map(run => view(run, hrefs));
  $('.views').append(...views);
  if (runs.length === 1) views[0].querySelector('[data-p=steer]').append($('.control'));

  let timer = null;
  const at = () => Math.max(0, Math.min(n, model.get('at'))), frame = (i, k = 0) => runs[k].frames[moments[i][k]];
  const concerns = (i, who) => runs.some((run, k) =>
    moments[i - 1]?.[k] !== moments[i][k] && frame(i, k).w.some(r => name(run, r) === who));
  const jump = by => {
    for (let i = at() + by; i >= 0 && i <= n; i += by) if (concerns(i, model.get('focus'))) return i;
    return at();
  };

  function draw() {
    const i = at(), focus = model.get('focus');
    views.forEach((v, k) => v.draw(moments[i][k]));
    [...views, ...root.querySelectorAll('.shape')].forEach((part, j) => {
      const run = runs[j % runs.length], me = String(run.requests.findIndex(q => q.name === focus));
      for (const e of part.querySelectorAll('[data-r]'))
        e.classList.toggle('dim', Boolean(focus && e.dataset.r) && !e.dataset.r.split(' ').includes(me));
    });
    for (const cursor of root.querySelectorAll('.cursor')) cursor.setAttribute('d', `M${i + .5} -1V35`);
    for (const chip of root.querySelectorAll('.chip')) chip.setAttribute('aria-pressed', chip.dataset.name === focus);
    if ($('.pick')) $('.pick').value = focus;
    $('[data-do=before]').disabled = !focus || jump(-1) === i;
    $('[data-do=next]').disabled = !focus || jump(1) === i;
    slide.value = i;
    slide.setAttribute('aria-valuetext', when(frame(i)));
    $('.place').textContent = `event ${i + 1} of ${n + 1}`;
    const heard = runs.map((run, k) => (run.title ? `${run.title}: ` : '') + aloud(frame(i, k)));
    $('.hear').textContent = timer ? '' : heard.join('. ');
  }
  function put(key, value) {
    model.set(key, value);
    model.save_changes();
    draw();
  }
  const go = i => put('at', Math.max(0, Math.min(n, i)));
  function play(on) {
    clearTimeout(timer);
    timer = on ? setTimeout(() => { go(at() + 1); play(at() < n); }, 900 / $('select').value) : null;
    const button = $('[data-do=play]'), what = on ? 'pause (space)' : 'play (space)';
    button.innerHTML = icon(on ? 'pause' : 'play');
    button.title = what;
    button.setAttribute('aria-label', what);
    if (!on) draw(); // and say where it has stopped
  }
  const doing = {
    first: () => go(0), back: () => go(at() - 1), step: () => go(at() + 1), last: () => go(n),
    before: () => go(jump(-1)), next: () => go(jump(1)),
    play() { const on = !timer; if (on && at() === n) go(0); play(on); },
  };
  function act(what) {
    if (timer && what !== 'play') play(false);
    doing[what]();
  }

  player.addEventListener('click', event => {
    const near = what => event.target.closest(what), button = near('button'), link = near('a[data-to]'), svg = near('.shape');
    const told = near('.views [title]'), there = link && el.querySelector(`a[data-stop="${link.dataset.to}"]`);
    if (button?.dataset.do) act(button.dataset.do);
    else if (button) put('focus', model.get('focus') === button.dataset.name ? '' : button.dataset.name);
    else if (there && !event.ctrlKey && !event.metaKey) { // the still's link: JupyterLab knows where it leads
      event.preventDefault();
      there.click();
    } else if (svg) {
      const box = svg.getBoundingClientRect(), to = Math.floor((event.clientX - box.left) / box.width * (n + 1));
      if (timer) play(false);
      go(to);
    } else if (told) $('.detail').textContent = told.title;
  });
  player.addEventListener('change', ({ target }) => { if (target.matches('.pick')) put('focus', target.value); });
  player.addEventListener('pointerover', event => {
    const told = event.target.closest('.views [title]');
    if (told) $('.detail').textContent = told.title;
  });
  player.addEventListener('focusin', event => {
    if (!event.target.matches('.panel')) return;
    const titles = [...event.target.querySelectorAll('[data-p] [title]')].map(e => e.title);
    $('.detail').textContent = titles.slice(0, 20).join(' · ');
  });
  player.addEventListener('keydown', event => {
    const tag = event.target.tagName, what = KEYS[event.key]; // some keys belong to the control that has the focus
    const own = { INPUT: !['n', 'p', ' '].includes(event.key), SELECT: true, BUTTON: event.key === ' ', A: event.key === ' ' };
    if (!what || own[tag] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    event.stopPropagation();
    act(what);
  });
  slide.addEventListener('input', () => {
    const to = Number(slide.value);
    if (timer) play(false);
    go(to);
  });
  model.on('change:at', draw);
  model.on('change:focus', draw);
  draw();
  return () => clearTimeout(timer);
}

export default { render };
