//! The test programs: cargo builds them, and its output names them. They are divided into parts that run in
//! processes of their own.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The program that contains most tests of a package, module by module: linking a program for each module
/// would take longer than running it.
const OF_MODULES: &str = "it";

/// A test program, or a part of one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Program {
    pub name: String,
    pub path: PathBuf,
    /// Its working directory: the package, as under `cargo test`.
    pub package: PathBuf,
    /// The full names of the tests to run; empty: all of them.
    pub only: Vec<String>,
}

impl Program {
    /// If the program consists of modules, a part for each of them, with the module's name.
    pub fn parts(self) -> Vec<Self> {
        if self.name != OF_MODULES {
            return vec![self];
        }
        // A program that does not list its tests is run as a whole, and then reports what is wrong.
        let listed = Command::new(&self.path).args(["--list", "--format", "terse"]).output();
        // If the list ended in the middle, it is not used either: the other tests would be left out silently.
        let parts = match listed {
            Ok(listed) if listed.status.success() => self.parts_of(&String::from_utf8_lossy(&listed.stdout)),
            _ => Vec::new(),
        };
        if parts.is_empty() { vec![self] } else { parts }
    }

    /// The parts in a list of its tests.
    fn parts_of(&self, list: &str) -> Vec<Self> {
        let mut modules = BTreeMap::<_, Vec<String>>::new();
        for test in list.lines().filter_map(|line| line.strip_suffix(": test")) {
            let module = test.split_once("::").map_or(OF_MODULES, |(module, _)| module);
            modules.entry(module).or_default().push(test.to_owned());
        }
        let parts = modules.into_iter().map(|(name, only)| Self { name: name.into(), only, ..self.clone() });
        parts.collect()
    }
}

/// Builds test programs with `cargo test --no-run` and these arguments; `found` gets each as soon as it is
/// built. `false`: not all can be built.
pub fn build(mut cargo: Command, what: &[&str], mut found: impl FnMut(Program)) -> Result<bool, String> {
    let fail = |error: std::io::Error| format!("cannot run cargo test --no-run: {error}");
    let mut child = cargo
        .args(["test", "--locked", "--no-run", "--message-format", "json-render-diagnostics"])
        .args(what)
        .stdout(Stdio::piped())
        .spawn()
        .map_err(fail)?;
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            program_of(&line.map_err(fail)?).into_iter().for_each(&mut found);
        }
    }
    Ok(child.wait().map_err(fail)?.success())
}

/// The test program that a message of cargo names, if any.
fn program_of(message: &str) -> Option<Program> {
    // A target also says whether it has tests. Its profile says whether this is the program with the tests.
    let (_, profile) = message.split_once(r#""profile":{"#)?;
    if !message.contains(r#""reason":"compiler-artifact""#)
        || !profile.split('}').next()?.contains(r#""test":true"#)
        || message.contains(r#""kind":["bench"]"#)
    {
        return None;
    }
    let path = PathBuf::from(text_of(message, "executable")?);
    let package = Path::new(&text_of(message, "manifest_path")?).parent()?.to_path_buf();
    let file = path.file_stem()?.to_str()?;
    let name = file.rsplit_once('-').map_or(file, |(name, _hash)| name).to_owned();
    Some(Program { name, path, package, only: Vec::new() })
}

/// The text of a key that occurs once in a line of JSON. Paths with quotes or backslashes are not supported.
fn text_of(message: &str, key: &str) -> Option<String> {
    let (_, rest) = message.split_once(&format!("\"{key}\":\""))?;
    let (text, _) = rest.split_once('"')?;
    (!text.contains('\\')).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_of_tests_are_found_in_messages() {
        let message = r#"{"reason":"compiler-artifact","manifest_path":"/p/disk/Cargo.toml","target":{"doctest":false,"test":true},"profile":{"opt_level":"1","test":true},"executable":"/t/deps/soak-12ab"}"#;
        let soak = Program {
            name: "soak".into(),
            path: "/t/deps/soak-12ab".into(),
            package: "/p/disk".into(),
            only: Vec::new(),
        };
        assert_eq!(program_of(message), Some(soak));
        assert_eq!(program_of(&message.replace("\"1\",\"test\":true", "\"1\",\"test\":false")), None);
        assert_eq!(program_of(&message.replace(r#""doctest":false"#, r#""kind":["bench"]"#)), None);
        assert_eq!(program_of(&message.replace("\"/t/deps/soak-12ab\"", "null")), None);
    }

    #[test]
    fn a_program_of_modules_has_a_part_for_each() {
        let whole = Program { name: OF_MODULES.into(), ..Program::default() };
        let list =
            "seal::one: test\ns3::deep::two: test\nseal::three: test\nalone: test\nseal::speed: benchmark\n";
        let parts = whole.parts_of(list);
        let parts: Vec<_> = parts.iter().map(|part| (&part.name[..], part.only.join(" "))).collect();
        let expected = [("it", "alone"), ("s3", "s3::deep::two"), ("seal", "seal::one seal::three")]
            .map(|(n, t)| (n, t.to_owned()));
        assert_eq!(parts, expected);
        // A program that lists nothing, cannot be run, or fails while listing, is not divided.
        let dir = std::env::temp_dir().join(format!("headwater-xtask-lists-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let lists = |name: &str, code: u8| {
            use std::os::unix::fs::PermissionsExt;
            let path = dir.join(name);
            std::fs::write(&path, format!("#!/bin/sh\necho 'seal::one: test'\nexit {code}\n")).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
            Program { path, ..whole.clone() }
        };
        let (good, bad) = (lists("good", 0), lists("bad", 1));
        let good_whole = good.clone();
        assert_eq!(
            good.parts(),
            [Program { name: "seal".into(), only: vec!["seal::one".into()], ..good_whole }]
        );
        for path in ["/bin/true".into(), "/nowhere".into(), bad.path] {
            let whole = Program { path, ..whole.clone() };
            assert_eq!(whole.clone().parts(), [whole]);
        }
        std::fs::remove_dir_all(dir).unwrap();
    }
}
