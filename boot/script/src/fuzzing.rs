//! Fuzzing oracle for boot scripts of iPXE and configurations of GRUB: no value can escape from its word in them. The
//! fuzzers in `fuzz/` and a bounded test run it.

use std::net::Ipv4Addr;

use crate::grub::configuration;
use crate::script::{Boot, refusal, script};

/// An oracle: takes arbitrary bytes, and panics if a property is violated.
pub type Oracle = fn(&[u8]);

/// All oracles, each with its name and seed inputs.
pub fn targets() -> Vec<(&'static str, Oracle, Vec<Vec<u8>>)> {
    let samples = ["pc-1\tdebian@3\tconsole=ttyS0 quiet\tno such image", "a\tb\troot=/dev/x\t${x} || shell"];
    vec![("boot_script", boot_script, samples.map(|sample| sample.as_bytes().to_vec()).to_vec())]
}

/// The oracle for scripts and configurations: whatever the values are, they have the same lines, quotes and commands. The
/// input is four texts separated by tabs: machine, version, kernel options, and a reason.
pub fn boot_script(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let mut parts = text.split('\t').map(str::to_owned);
    let mut part = || parts.next().unwrap_or_default();
    let (machine, version, options, why) = (part(), part(), part(), part());
    let server = Ipv4Addr::new(10, 0, 0, 2);
    if let Ok(text) = refusal(&machine, &why, server, 80, "/b") {
        let lines = read(&text);
        // The lines of a refusal, without the first one, "#!ipxe".
        assert_eq!(lines.len(), 5, "{text:?}");
        assert!(
            lines.first().is_some_and(|line| line.first().is_some_and(|word| word == "echo")),
            "{text:?}"
        );
    }
    let boot = Boot {
        machine: machine.clone(),
        version: version.clone(),
        server,
        port: 80,
        script: "/b".into(),
        kernel: "/k".into(),
        initrd: "/i".into(),
        settings: "/s".into(),
        options: options.clone(),
    };
    if let Ok(text) = configuration(&boot) {
        assert!(
            !text.contains(['$', '\\', '\'', '|', '&', '<', '>', '{', '[', '*', '?', '#', '`']),
            "{text:?}"
        );
        // The lines, quotes and semicolons of the template in `configuration`: no value adds any.
        assert_eq!(
            (text.lines().count(), text.matches('"').count(), text.matches(';').count()),
            (7, 4, 2),
            "{text:?}"
        );
    }
    let Ok(text) = script(&boot) else { return };
    let lines = read(&text);
    let commands: Vec<_> = lines.iter().filter_map(|line| line.first().map(String::as_str)).collect();
    let expected =
        ["echo", "imgfree", "kernel", "initrd", "initrd", "boot", ":failed", "echo", "sleep", "chain"];
    assert_eq!(commands, expected, "{text:?}");
    let kernel = lines.get(2).map(Vec::as_slice).unwrap_or_default();
    let given = options.split_ascii_whitespace();
    let words: Vec<_> =
        ["kernel", "--name", "kernel", "http://10.0.0.2:80/k", "initrd=initrd", "initrd=settings"]
            .into_iter()
            .chain(given)
            .chain(["||", "goto", "failed"])
            .collect();
    assert_eq!(kernel, words);
    let said = [machine.as_str(), "boots", &version];
    let said: Vec<_> =
        ["echo", "headwater:"].into_iter().chain(said).filter(|word| !word.is_empty()).collect();
    assert_eq!(lines.first().map(Vec::as_slice).unwrap_or_default(), said);
}

/// The lines of a script, split into words as iPXE splits them. Panics at a character that has a special meaning
/// inside a word.
fn read(text: &str) -> Vec<Vec<String>> {
    let lines = text.strip_prefix("#!ipxe\n").unwrap_or_else(|| panic!("{text:?} is not a script"));
    let words = |line: &str| {
        let words = line.split([' ', '\t', '\r', '\x0b', '\x0c']).filter(|word| !word.is_empty());
        words
            .map(|word| {
                let is_operator = matches!(word, "||" | "&&");
                let has_meaning = word.contains(['$', '"', '\'', '\\', '#', '|', '&', ';', '\0']);
                assert!(is_operator || !has_meaning, "{word:?} in {line:?}");
                word.to_owned()
            })
            .collect::<Vec<_>>()
    };
    lines.lines().map(words).filter(|words| !words.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_value_escapes_from_its_word() {
        let fed = headwater_testkit::mutate::all(targets());
        assert!(fed > 2000, "{fed} inputs");
    }
}
