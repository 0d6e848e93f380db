//! The screen at several sizes of the terminal, as text.

use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;
use crate::cmd::top::model::tests::{figures, machine, top_of};

const PLAIN: Palette = Palette { colours: false, plain: true };

fn terminal(top: &Top, width: u16, height: u16, palette: Palette) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, top, 90_061_000, &palette)).unwrap();
    terminal
}

/// The lines of the screen without blanks at their ends.
fn screen(top: &Top, width: u16, height: u16) -> Vec<String> {
    let terminal = terminal(top, width, height, PLAIN);
    let buffer = terminal.backend().buffer();
    let lines = buffer.content().chunks(usize::from(width));
    lines
        .map(|line| line.iter().map(|cell| cell.symbol()).collect::<String>().trim_end().to_owned())
        .collect()
}

fn sample() -> Top {
    let machines = vec![
        machine("pc-1", "running", Some(1000)),
        machine("pc-2", "booting", Some(100)),
        machine("pc-3", "stopped", None),
    ];
    top_of(figures(machines, &["pc-1"]))
}

#[test]
fn a_terminal_of_80_columns_shows_host_alarm_and_machines() {
    let mut top = sample();
    let mut later = figures(vec![machine("pc-1", "running", Some(1010))], &["pc-1"]);
    later.list.total = 3;
    later.status.machines = 3;
    top.take(later, 2_000);
    let lines = screen(&top, 80, 12);
    let expected = [
        "headwater 0.1.0  up 1d 01h  1 of 3 machines on  1 alarm",
        "cache RAM   #####--------------- 1.0 GiB of 4.0 GiB",
        "cache disk  ##------------------ 10.0 GiB, 90.0 GiB free",
        "! machine pc-1 since 1970-01-01 00:00:00Z: the disk has no space; headwater mach",
        "",
        "MACHINE              STATE    RAM              DISK                IOPS WRITE/S",
        "pc-1                 running  ######## 252.5M  ########1010.0M     1010   10.0M",
    ];
    assert_eq!(lines[..expected.len()], expected, "{lines:#?}");
    assert_eq!(lines[11], "1 of 3  ? help  / filter  < > sort  Enter page  q leave");
}

#[test]
fn columns_go_and_the_name_stays_on_narrow_terminals() {
    let lines = screen(&sample(), 40, 10);
    assert!(lines[5].starts_with("MACHINE") && !lines[5].contains("DISK"), "{lines:#?}");
    assert!(lines[6].starts_with("pc-1") && lines[6].contains("running"), "{lines:#?}");
    let wide = screen(&sample(), 200, 50);
    assert!(wide[5].ends_with("VERSION") && wide[6].ends_with("debian@3"), "{wide:#?}");
    let small = screen(&sample(), 20, 3);
    assert!(small[0].starts_with("the terminal is too"), "{small:#?}");
    // No size makes it panic.
    for (width, height) in [(1, 1), (30, 8), (31, 9), (300, 8)] {
        screen(&sample(), width, height);
    }
}

#[test]
fn without_colours_no_cell_has_one() {
    let has_colour = |palette| {
        let terminal = terminal(&sample(), 100, 20, palette);
        terminal
            .backend()
            .buffer()
            .content()
            .iter()
            .any(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset)
    };
    assert!(!has_colour(Palette { colours: false, plain: false }));
    assert!(has_colour(Palette { colours: true, plain: false }));
}

#[test]
fn text_from_elsewhere_cannot_steer_the_terminal() {
    let mut odd = machine("pc-1", "crashed", None);
    odd.reason = Some("\u{1b}[2Jgone\u{7}".to_owned());
    let mut figures = figures(vec![odd.clone()], &["\u{1b}]0;x\u{7}"]);
    figures.detail = Some((odd, Vec::new()));
    let mut top = top_of(figures);
    top.page = Page::Detail;
    let text = screen(&top, 80, 20).join("\n");
    assert!(text.contains("[2Jgone") && !text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
}
