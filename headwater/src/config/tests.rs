//! Tests of configuration files.

use super::*;

/// The file that the package installs.
const PACKAGED: &str = include_str!("../../../packaging/headwater.toml");

fn file(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}

fn refused(text: &str) -> String {
    let file = file(text);
    let error = format!("{:#}", read(file.path()).unwrap_err());
    error.replace(&file.path().display().to_string(), "FILE")
}

/// The lines of the packaged file that set a key, in force or behind a `#`.
fn packaged_keys() -> Vec<(String, String)> {
    let lines = PACKAGED.lines().map(|line| line.strip_prefix('#').unwrap_or(line));
    let keys = lines.filter_map(|line| line.split_once(" = "));
    let is_key =
        |key: &str| !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'-');
    keys.filter(|(key, _)| is_key(key)).map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

#[test]
fn every_flag_of_serve_has_a_key_in_the_packaged_file() {
    let shown: Vec<String> = packaged_keys().into_iter().map(|(key, _)| key).collect();
    let flags = serve_flags();
    assert!(flags.len() > 25, "{}", flags.len());
    for flag in &flags {
        let key = flag.get_long().unwrap();
        assert!(shown.iter().any(|shown| shown == key), "packaging/headwater.toml says nothing of '{key}'");
    }
    assert_eq!(shown.len(), flags.len(), "{shown:?}");
}

#[test]
fn every_line_of_the_packaged_file_can_be_put_in_force() {
    read(file(PACKAGED).path()).unwrap();
    for (key, value) in packaged_keys() {
        let settings = read(file(&format!("{key} = {value}\n")).path());
        let settings = settings.unwrap_or_else(|e| panic!("{key} = {value}: {e:#}"));
        assert_eq!(settings[0].key, key);
    }
}

#[test]
fn errors_name_the_line_and_the_nearest_key() {
    let cases = [
        (
            "log = \"info\"\n\ncache_ram = \"4G\"\n",
            "FILE:3: unknown key 'cache_ram': did you mean 'cache-ram'?",
        ),
        ("scrubb = \"1M\"", "FILE:1: unknown key 'scrubb': did you mean 'scrub'?"),
        ("from = \"https://a\"", "FILE:1: unknown key 'from': the key is 'store' in this file"),
        ("entirely-else = 1", "FILE:1: unknown key 'entirely-else': 'headwater config show' lists the keys"),
        ("config = \"x\"", "FILE:1: unknown key 'config'"),
        ("[serve]\nlog = \"info\"", "FILE:1: unknown key 'serve'"),
        ("resume = \"yes\"", "FILE:1: 'resume' takes true or false, not a text"),
        ("log = true", "FILE:1: 'log' takes a text in quotes or a number, not true or false"),
        ("\nlisten = \"0.0.0.0\"", "FILE:2: cannot use the value of 'listen': invalid value '0.0.0.0'"),
        ("cache-ram = \"1\"", "FILE:1: cannot use the value of 'cache-ram': "),
        ("log = \"info\"\nlog = \"warn\"", "FILE:2: it is not TOML: duplicate key"),
        ("log = info", "FILE:1: it is not TOML: "),
    ];
    for (text, expected) in cases {
        let error = refused(text);
        assert!(error.starts_with(expected), "{text:?}: {error}");
    }
    let two = refused("scrubb = 1\nresume = 1\n");
    assert!(two.contains("FILE:1: ") && two.contains("; FILE:2: "), "{two}");
}

#[test]
fn flags_override_the_file() {
    let file = file(
        "log = \"debug\"\nscrub = \"1M\"\nscrub-pause = 5\nrepair-from = [\"/a\", \"/b\"]\nresume = false\n",
    );
    let path = file.path().to_str().unwrap();
    let of = |words: &[&str]| {
        let words =
            ["headwater", "serve", "--config", path].iter().chain(words).map(OsString::from).collect();
        Effective::of(words).unwrap()
    };
    let plain = of(&[]);
    assert_eq!(
        (plain.args.log.as_str(), plain.args.scrub, plain.args.scrub_pause),
        ("debug", Some(1 << 20), Some(5))
    );
    assert_eq!(plain.args.repair_from, ["/a", "/b"]);
    assert!(!plain.args.resume);
    assert_eq!(plain.values["log"].1, Source::File(file.path().to_owned(), 1));
    assert_eq!(plain.values["boot-http"].1, Source::Default);
    // `--scrub-pause` needs `scrub`, which only the file has.
    let other = of(&["--log=error", "--scrub-pause", "7", "--repair-from", "/c", "--resume"]);
    assert_eq!((other.args.log.as_str(), other.args.scrub_pause), ("error", Some(7)));
    assert_eq!(other.args.repair_from, ["/c"]);
    assert!(other.args.resume);
    assert_eq!(other.values["log"].1, Source::CommandLine);
    assert_eq!(plain.changed(&other), ["log", "repair-from", "resume", "scrub-pause"]);
}

#[test]
fn what_does_not_fit_together_is_refused() {
    for (text, words) in [
        ("scrub-pause = 5", "--scrub"),
        ("repair-from = \"/a\"", "--scrub"),
        ("log = \"inof\"", "log filter"),
        ("boot = \"eth0\"", "--store-listen"),
    ] {
        let file = file(text);
        let error = Effective::of(serve_with(Some(file.path()))).err().unwrap().to_string();
        assert!(error.contains(words) && error.contains(file.path().to_str().unwrap()), "{text}: {error}");
    }
}

#[test]
fn other_commands_are_left_alone() {
    let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
    for line in
        [&["headwater", "status"][..], &["headwater", "serve", "--log", "x"], &["headwater", "nonsense"]]
    {
        assert_eq!(with_file(words(line)).unwrap(), words(line));
    }
    let missing = with_file(words(&["headwater", "serve", "--config", "/no/such/file"]));
    assert!(
        format!("{:#}", missing.unwrap_err()).contains("cannot read the configuration file /no/such/file")
    );
}
