//! A display in the page: it shows what QEMU's own pictures show, and what is typed at it reaches the guest.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use headwater_testkit::wait_until;
use serde_json::json;

use super::browser::Browser;
use super::{link, with_console};
use crate::support::{Daemon, short_dir};

/// A disk whose boot sector prints `>` on the screen, and then each key that is typed.
fn typewriter_disk() -> Vec<u8> {
    #[rustfmt::skip]
    const CODE: [u8; 34] = [
        0xb8, 0x03, 0x00, 0xcd, 0x10,             // mov ax, 3; int 0x10: text of 80 by 25
        0xb4, 0x01, 0xb9, 0x00, 0x20, 0xcd, 0x10, // mov ah, 1; mov cx, 0x2000; int 0x10: no cursor, which blinks
        0xb4, 0x0e, 0xb0, b'>',                   // mov ah, 0xe; mov al, '>'
        0xbb, 0x07, 0x00, 0xcd, 0x10,             // mov bx, 7; int 0x10: print
        0xb4, 0x00, 0xcd, 0x16,                   // next: mov ah, 0; int 0x16: a key
        0xb4, 0x0e, 0xbb, 0x07, 0x00, 0xcd, 0x10, // mov ah, 0xe; mov bx, 7; int 0x10: print
        0xeb, 0xf3,                               // jmp next
    ];
    let mut disk = vec![0; 1 << 20];
    disk[..CODE.len()].copy_from_slice(&CODE);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    disk
}

const BUTTON: &str = "[...document.querySelectorAll('button')].find(button => button.innerText === ";

fn click(browser: &mut Browser, name: &str) {
    let button = format!("{BUTTON}'{name}')");
    browser.wait(&format!("{button}?.disabled === false"));
    browser.value(&format!("{button}.click()"));
}

/// All pixels of a picture as text.
const PIXELS: &str =
    "(canvas => canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.join())";

const CANVAS: &str = "document.querySelector('.display canvas')";

/// That the display shows so many characters at its beginning, in cells of 9 pixels, and nothing else.
fn shows_characters(count: usize) -> String {
    format!(
        "(canvas => {{ \
           const isLit = (x, width) => canvas.getContext('2d').getImageData(x, 0, width, 400).data\
             .some((value, at) => at % 4 < 3 && value > 0); \
           return canvas?.width === 720 && canvas.height === 400 \
             && [...Array({count}).keys()].every(cell => isLit(cell * 9, 9)) \
             && !isLit({count} * 9, 720 - {count} * 9); }})({CANVAS})"
    )
}

/// Whether the display in the page is, pixel by pixel, the picture that QEMU makes of it now.
fn is_the_picture(browser: &mut Browser, daemon: &Daemon) -> bool {
    let file = daemon.path().join("screen.png");
    daemon.cli(&["machine", "screenshot", "lab", file.to_str().unwrap()]).ok();
    let png = json!(STANDARD.encode(std::fs::read(&file).unwrap()));
    std::fs::remove_file(&file).unwrap();
    let same = format!(
        "(async () => {{ const bytes = Uint8Array.from(atob({png}), char => char.charCodeAt(0)); \
         const picture = await createImageBitmap(new Blob([bytes])); \
         const canvas = new OffscreenCanvas(picture.width, picture.height); \
         canvas.getContext('2d').drawImage(picture, 0, 0); \
         return {PIXELS}(canvas) === {PIXELS}({CANVAS}); }})()"
    );
    browser.value(&same) == true
}

#[test]
fn a_display_in_the_page_shows_the_screen_and_takes_keys() {
    let daemon = with_console(short_dir(), "127.0.0.1:0");
    let disk = daemon.path().join("typewriter.raw");
    std::fs::write(&disk, typewriter_disk()).unwrap();
    daemon.cli(&["image", "import", disk.to_str().unwrap()]).ok();
    daemon.create("lab", "typewriter", &["--display", "vnc"]);
    daemon.cli(&["machine", "start", "lab"]).ok();
    let mut browser = Browser::start();
    browser.open(&link(&daemon, &[]));
    browser.wait("document.querySelector('main h1')");
    browser.value("location.hash = '#/machines/lab'");
    click(&mut browser, "Display");
    click(&mut browser, "Open the display");
    browser.wait("document.querySelector('.phase.open')");
    // The firmware is done when the guest has cleared the screen.
    browser.wait(&shows_characters(1));
    browser.wait(&format!("document.activeElement === {CANVAS}"));
    for count in [2, 3] {
        browser.press("/");
        browser.wait(&shows_characters(count));
    }
    wait_until("the page shows what QEMU's picture shows", || is_the_picture(&mut browser, &daemon));
    assert!(browser.complaints().is_empty(), "{:?}", browser.complaints());
    daemon.cli(&["machine", "stop", "lab", "--force"]).ok();
    browser.wait("!document.querySelector('.display')");
}
