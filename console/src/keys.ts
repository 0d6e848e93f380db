// Types a text at a machine's display, key by key, as on a keyboard of the United States: the guest decides what its keys mean.

const SHIFT = 0xffe1;
const RETURN = 0xff0d;
const TAB = 0xff09;

/** A longer text is no password and no command: it belongs into a file. */
export const TYPED_MAX = 4096;

/** The characters that are typed with the shift key. */
const SHIFTED = /[A-Z~!@#$%^&*()_+{}|:"<>?]/;

export interface Keyboard {
  sendKey(keysym: number, code: string | null, down?: boolean): void;
}

/** Why a text cannot be typed, if it cannot. */
export function refusal(text: string): string | null {
  if (text === "") return "there is no text in the clipboard";
  if (text.length > TYPED_MAX) return `the clipboard has ${text.length} characters, and ${TYPED_MAX} can be typed`;
  const odd = /[^\t\n\r -~]/u.exec(text);
  return odd ? `the keyboard has no key for '${odd[0]}'` : null;
}

export function type(keyboard: Keyboard, text: string): void {
  for (const char of text.replaceAll("\r\n", "\n")) {
    const keysym = char === "\n" || char === "\r" ? RETURN : char === "\t" ? TAB : char.charCodeAt(0);
    const isShifted = SHIFTED.test(char);
    if (isShifted) keyboard.sendKey(SHIFT, "ShiftLeft", true);
    keyboard.sendKey(keysym, null);
    if (isShifted) keyboard.sendKey(SHIFT, "ShiftLeft", false);
  }
}
