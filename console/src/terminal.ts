// The screen of a terminal, as serial consoles need it: most of what ECMA-48 and the VT100 define, 16 colours, two screens.

export const COLUMNS = 80;
export const ROWS = 24;
/** So many lines above the screen are kept. */
const SCROLLBACK = 1000;
/** A sequence that is longer is no sequence. */
const SEQUENCE_MAX = 4096;

/** A piece of a line in one style: `class` has names such as `f1 b4 bold`. */
export interface Run {
  text: string;
  class: string;
}

interface Style {
  front: number | null;
  back: number | null;
  flags: string;
}

interface Cell {
  char: string;
  style: Style;
}

const PLAIN: Style = { front: null, back: null, flags: "" };
const BLANK: Cell = { char: " ", style: PLAIN };

/** The line drawing characters of the VT100, from ` to ~. */
const DRAWING = "\u25c6\u2592\u2409\u240c\u240d\u240a\u00b0\u00b1\u2424\u240b\u2518\u2510\u250c\u2514\u253c\u23ba\u23bb\u2500\u23bc\u23bd\u251c\u2524\u2534\u252c\u2502\u2264\u2265\u03c0\u2260\u00a3\u00b7";

const blankLine = () => new Array<Cell>(COLUMNS).fill(BLANK);
const blankScreen = () => Array.from({ length: ROWS }, blankLine);

export class Terminal {
  /** What is to be sent back: answers to questions of the guest. */
  reply: (text: string) => void = () => {};
  /** Whether the arrow keys send what applications ask for. */
  isApplication = false;
  isCursorShown = true;

  #above: Run[][] = [];
  #lines = blankScreen();
  #other: Cell[][] | null = null;
  #row = 0;
  #column = 0;
  #top = 0;
  #bottom = ROWS - 1;
  #style = PLAIN;
  #saved = { row: 0, column: 0, style: PLAIN };
  #isDrawing = false;
  #isWrapping = true;
  #rest = "";
  readonly #decoder = new TextDecoder();

  /** Takes what the guest printed. */
  write(bytes: Uint8Array): void {
    let text = this.#rest + this.#decoder.decode(bytes, { stream: true });
    this.#rest = "";
    while (text !== "") {
      const at = this.#take(text);
      if (at === 0) {
        // The rest of the sequence comes with the next bytes.
        this.#rest = text.length < SEQUENCE_MAX ? text : "";
        return;
      }
      text = text.slice(at);
    }
  }

  /** All lines, and where the cursor is in them. */
  render(): { lines: Run[][]; row: number; column: number } {
    const lines = [...this.#above, ...this.#lines.map(runs)];
    return { lines, row: this.#above.length + this.#row, column: Math.min(this.#column, COLUMNS - 1) };
  }

  /** Takes one character or sequence, and gives its length; 0 if it is not whole. */
  #take(text: string): number {
    const char = text[0]!;
    if (char === "\u001b") return this.#escape(text);
    if (char < " " || char === "\u007f") {
      this.#control(char);
      return 1;
    }
    const point = String.fromCodePoint(text.codePointAt(0)!);
    this.#print(point);
    return point.length;
  }

  #control(char: string): void {
    if (char === "\n" || char === "\v" || char === "\f") this.#feed();
    else if (char === "\r") this.#column = 0;
    else if (char === "\b") this.#column = Math.max(0, Math.min(this.#column, COLUMNS - 1) - 1);
    else if (char === "\t") this.#column = Math.min(COLUMNS - 1, (Math.floor(this.#column / 8) + 1) * 8);
    else if (char === "\u000e" || char === "\u000f") this.#isDrawing = char === "\u000e";
  }

  #print(char: string): void {
    if (this.#column >= COLUMNS) {
      if (this.#isWrapping) {
        this.#column = 0;
        this.#feed();
      } else this.#column = COLUMNS - 1;
    }
    const drawn = this.#isDrawing && char >= "`" && char <= "~" ? DRAWING[char.charCodeAt(0) - 0x60]! : char;
    this.#lines[this.#row]![this.#column] = { char: drawn, style: this.#style };
    this.#column += 1;
  }

  #feed(): void {
    if (this.#row === this.#bottom) this.#scroll(1);
    else this.#row = Math.min(ROWS - 1, this.#row + 1);
  }

  /** Moves the lines between the margins up, or down if `count` is negative. */
  #scroll(count: number, top = this.#top): void {
    for (let n = 0; n < Math.min(Math.abs(count), ROWS); n += 1) {
      if (count > 0) {
        const [gone] = this.#lines.splice(top, 1);
        this.#lines.splice(this.#bottom, 0, blankLine());
        if (top === 0 && this.#other === null) {
          this.#above.push(runs(gone!));
          if (this.#above.length > SCROLLBACK) this.#above.shift();
        }
      } else {
        this.#lines.splice(this.#bottom, 1);
        this.#lines.splice(top, 0, blankLine());
      }
    }
  }

  #escape(text: string): number {
    const kind = text[1];
    if (kind === undefined) return 0;
    if (kind === "[") {
      const [whole, prefix, numbers, final] = /^\u001b\[([<-?]?)([\d;:]*)[ -/]*([@-~])/.exec(text) ?? [];
      if (whole === undefined) return /^\u001b\[[ -?]*$/.test(text) ? 0 : 2;
      this.#sequence(prefix!, numbers!.split(/[;:]/).map(Number), final!);
      return whole.length;
    }
    if ("]P^_X".includes(kind)) {
      // Titles and the like: left out.
      const end = /\u0007|\u001b\\/.exec(text);
      return end ? end.index + end[0].length : text.length < SEQUENCE_MAX ? 0 : 2;
    }
    if ("()*+#%".includes(kind)) {
      if (text[2] === undefined) return 0;
      if (kind === "(") this.#isDrawing = text[2] === "0";
      return 3;
    }
    if (kind === "7") this.#save();
    else if (kind === "8") this.#restore();
    else if (kind === "D") this.#feed();
    else if (kind === "E") {
      this.#column = 0;
      this.#feed();
    } else if (kind === "M") {
      if (this.#row === this.#top) this.#scroll(-1);
      else this.#row = Math.max(0, this.#row - 1);
    } else if (kind === "c") this.#reset();
    return 2;
  }

  #reset(): void {
    this.#lines = blankScreen();
    this.#other = null;
    this.#row = this.#column = this.#top = 0;
    this.#bottom = ROWS - 1;
    this.#style = PLAIN;
    this.#isDrawing = this.isApplication = false;
    this.#isWrapping = this.isCursorShown = true;
  }

  #save(): void {
    this.#saved = { row: this.#row, column: this.#column, style: this.#style };
  }

  #restore(): void {
    ({ row: this.#row, column: this.#column, style: this.#style } = this.#saved);
  }

  #go(row: number, column: number): void {
    this.#row = Math.max(0, Math.min(ROWS - 1, row));
    this.#column = Math.max(0, Math.min(COLUMNS - 1, column));
  }

  #sequence(prefix: string, numbers: number[], final: string): void {
    const count = Math.max(1, numbers[0] || 1);
    if (prefix === "?" && (final === "h" || final === "l")) {
      for (const mode of numbers) this.#mode(mode, final === "h");
      return;
    }
    if (prefix !== "") return;
    const line = this.#lines[this.#row]!;
    switch (final) {
      case "A": return this.#go(this.#row - count, this.#column);
      case "B": case "e": return this.#go(this.#row + count, this.#column);
      case "C": case "a": return this.#go(this.#row, this.#column + count);
      case "D": return this.#go(this.#row, this.#column - count);
      case "E": return this.#go(this.#row + count, 0);
      case "F": return this.#go(this.#row - count, 0);
      case "G": case "`": return this.#go(this.#row, count - 1);
      case "d": return this.#go(count - 1, this.#column);
      case "H": case "f": return this.#go(count - 1, (numbers[1] || 1) - 1);
      case "J": return this.#eraseLines(numbers[0] || 0);
      case "K": return this.#erase(this.#row, numbers[0] || 0);
      case "L": return this.#insert(count);
      case "M": return this.#remove(count);
      case "S": return this.#scroll(count);
      case "T": return this.#scroll(-count);
      case "P": line.splice(this.#column, count); break;
      case "@": line.splice(this.#column, 0, ...blankLine().slice(0, count)); break;
      case "X": line.fill(BLANK, this.#column, this.#column + count); break;
      case "r": return this.#margins(count - 1, (numbers[1] || ROWS) - 1);
      case "s": return this.#save();
      case "u": return this.#restore();
      case "m": return this.#paint(numbers);
      case "n":
        if (numbers[0] === 6) this.reply(`\u001b[${this.#row + 1};${Math.min(this.#column, COLUMNS - 1) + 1}R`);
        // Any other is not answered: a guest that echoes the answer would ask again without end.
        else if (numbers[0] === 5) this.reply("\u001b[0n");
        return;
      case "c": return this.reply("\u001b[?1;2c");
      default: return;
    }
    // Cells were put in or taken out: the line keeps its width.
    this.#lines[this.#row] = [...line, ...blankLine()].slice(0, COLUMNS);
  }

  #insert(count: number): void {
    if (this.#row < this.#top || this.#row > this.#bottom) return;
    this.#scroll(-count, this.#row);
    this.#column = 0;
  }

  #remove(count: number): void {
    if (this.#row < this.#top || this.#row > this.#bottom) return;
    this.#column = 0;
    for (let n = 0; n < Math.min(count, ROWS); n += 1) {
      this.#lines.splice(this.#row, 1);
      this.#lines.splice(this.#bottom, 0, blankLine());
    }
  }

  #margins(top: number, bottom: number): void {
    if (top < bottom && bottom < ROWS) [this.#top, this.#bottom] = [top, bottom];
    this.#go(0, 0);
  }

  /** From the cursor to the end, from the beginning to the cursor, or all. */
  #erase(row: number, what: number): void {
    const [from, to] = what === 0 ? [this.#column, COLUMNS] : what === 1 ? [0, this.#column + 1] : [0, COLUMNS];
    const blank = this.#style.back === null ? BLANK : { char: " ", style: { ...PLAIN, back: this.#style.back } };
    this.#lines[row]!.fill(blank, from, to);
  }

  #eraseLines(what: number): void {
    if (what <= 1) this.#erase(this.#row, what);
    for (let row = 0; row < ROWS; row += 1) {
      if (what >= 2 || (what === 0 && row > this.#row) || (what === 1 && row < this.#row)) this.#erase(row, 2);
    }
    if (what === 3) this.#above = [];
  }

  #mode(mode: number, isOn: boolean): void {
    if (mode === 1) this.isApplication = isOn;
    else if (mode === 7) this.#isWrapping = isOn;
    else if (mode === 25) this.isCursorShown = isOn;
    else if (mode === 47 || mode === 1047 || mode === 1049) this.#swap(isOn);
  }

  /** To the second screen, which has no lines above it, or back. */
  #swap(toSecond: boolean): void {
    if (toSecond === (this.#other !== null)) return;
    if (toSecond) {
      this.#save();
      this.#other = this.#lines;
      this.#lines = blankScreen();
    } else {
      this.#lines = this.#other!;
      this.#other = null;
      this.#restore();
    }
  }

  #paint(numbers: number[]): void {
    let { front, back, flags } = this.#style;
    const names = new Set(flags.split(" ").filter(Boolean));
    for (let at = 0; at < numbers.length; at += 1) {
      const number = numbers[at]!;
      if (number === 0) {
        front = back = null;
        names.clear();
      } else if (number === 1) names.add("bold");
      else if (number === 2) names.add("dim");
      else if (number === 4) names.add("under");
      else if (number === 7) names.add("swap");
      else if (number === 22) ["bold", "dim"].forEach((name) => names.delete(name));
      else if (number === 24) names.delete("under");
      else if (number === 27) names.delete("swap");
      else if (number >= 30 && number <= 37) front = number - 30;
      else if (number >= 40 && number <= 47) back = number - 40;
      else if (number >= 90 && number <= 97) front = number - 82;
      else if (number >= 100 && number <= 107) back = number - 92;
      else if (number === 39) front = null;
      else if (number === 49) back = null;
      else if (number === 38 || number === 48) {
        // Of 256 colours, the first 16; of all colours, none.
        const colour = numbers[at + 1] === 5 && (numbers[at + 2] ?? 16) < 16 ? numbers[at + 2]! : null;
        if (number === 38) front = colour;
        else back = colour;
        at += numbers[at + 1] === 5 ? 2 : 4;
      }
    }
    this.#style = { front, back, flags: [...names].sort().join(" ") };
  }
}

const classOf = ({ front, back, flags }: Style) => [front !== null && `f${front}`, back !== null && `b${back}`, flags].filter(Boolean).join(" ");

/** A line as pieces of one style, without blanks at its end. */
function runs(line: Cell[]): Run[] {
  const found: Run[] = [];
  let last: Style | null = null;
  for (const { char, style } of line) {
    if (style === last) found[found.length - 1]!.text += char;
    else found.push({ text: char, class: classOf(style) });
    last = style;
  }
  const end = found.at(-1);
  if (end && end.class === "") {
    end.text = end.text.trimEnd();
    if (end.text === "") found.pop();
  }
  return found;
}

const FINALS: Record<string, string> = { ArrowUp: "A", ArrowDown: "B", ArrowRight: "C", ArrowLeft: "D", Home: "H", End: "F" };
const TILDES: Record<string, number> = { Insert: 2, Delete: 3, PageUp: 5, PageDown: 6, F5: 15, F6: 17, F7: 18, F8: 19, F9: 20, F10: 21, F11: 23, F12: 24 };

/** What a key sends, if it is more than the text that it types. */
export function keyBytes(event: KeyboardEvent, isApplication: boolean): string | null {
  const { key } = event;
  if (event.isComposing || event.metaKey) return null;
  if (key === "Enter") return "\r";
  if (key === "Backspace") return "\u007f";
  if (key === "Tab") return event.shiftKey ? null : "\t";
  if (key === "Escape") return "\u001b";
  if (FINALS[key]) return `\u001b${isApplication ? "O" : "["}${FINALS[key]}`;
  if (TILDES[key]) return `\u001b[${TILDES[key]}~`;
  if (/^F[1-4]$/.test(key)) return `\u001bO${"PQRS"[Number(key[1]) - 1]}`;
  if (event.ctrlKey && !event.altKey && /^[@-_a-z ]$/.test(key)) return String.fromCharCode(key.toUpperCase().charCodeAt(0) & 0x1f);
  if (event.altKey && !event.ctrlKey && key.length === 1) return `\u001b${key}`;
  return null;
}
