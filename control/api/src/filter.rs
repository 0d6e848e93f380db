//! The filter language of lists of machines, shared by the API, the command line and the console.
//!
//! ```text
//!   filter = term*                      all terms must match
//!   term   = ["-"] (word | key ":" value ("," value)* | key ("<" | "<=" | ">" | ">=") number)
//!   value  = text with "*" for any characters, or "text with blanks"
//!   number = digits with one of the units %, s, K, M, G, T
//! ```
//!
//! `state:running,booting catalog:class version:old ram>80% -name:test-*`. A word alone matches names that contain it. Letters match in
//! either case.

use crate::machine::{CacheMode, Machine, MachineState};
use crate::problem::{Problem, ProblemKind};

/// The longest filter.
pub const MAX_FILTER_BYTES: usize = 4096;

/// The keys of texts.
const TEXT_KEYS: [&str; 9] = ["name", "state", "catalog", "image", "version", "mac", "boot", "cache", "is"];

/// The keys of numbers.
const NUMBER_KEYS: [&str; 5] = ["ram", "disk", "iops", "boot", "memory"];

/// What `is:` knows.
const IS: [&str; 7] = ["on", "off", "pinned", "kept", "editing", "alarm", "claimed"];

/// A filter that was read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Filter(Vec<Term>);

#[derive(Clone, Debug, PartialEq)]
struct Term {
    is_negated: bool,
    test: Test,
}

#[derive(Clone, Debug, PartialEq)]
enum Test {
    Word(String),
    Text { key: String, values: Vec<String> },
    Number { key: String, comparison: Comparison, number: f64, unit: Unit },
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Comparison {
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Unit {
    Plain,
    Percent,
}

impl Filter {
    /// Reads a filter.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        if text.len() > MAX_FILTER_BYTES {
            return Err(odd(text, format!("it is longer than {MAX_FILTER_BYTES} bytes")));
        }
        let terms: Result<Vec<_>, String> = words(text)?.iter().map(|word| term(word)).collect();
        terms.map(Self).map_err(|why| odd(text, why))
    }

    /// Whether a machine matches.
    pub fn matches(&self, machine: &Machine) -> bool {
        self.0.iter().all(|term| term.test.matches(machine) != term.is_negated)
    }
}

fn odd(text: &str, why: String) -> Problem {
    let shown: String = text.chars().take(100).collect();
    Problem::new(ProblemKind::Invalid, format!("cannot read the filter '{}': {why}", shown.escape_debug()))
        .advise("write for instance: state:running catalog:class version:old ram>80% -name:test-*")
}

/// The words of a text: blanks within quotes belong to a word.
fn words(text: &str) -> Result<Vec<String>, Problem> {
    let (mut words, mut word, mut is_quoted) = (Vec::new(), String::new(), false);
    for c in text.chars() {
        match c {
            '"' => is_quoted = !is_quoted,
            c if c.is_whitespace() && !is_quoted => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
            }
            c => word.push(c),
        }
    }
    if is_quoted {
        return Err(odd(text, "a quotation mark has no second one".to_owned()));
    }
    if !word.is_empty() {
        words.push(word);
    }
    Ok(words)
}

fn term(word: &str) -> Result<Term, String> {
    let (rest, is_negated) = word.strip_prefix('-').map_or((word, false), |rest| (rest, true));
    if rest.is_empty() {
        return Err("nothing follows the '-'".to_owned());
    }
    let at = rest.find([':', '<', '>']);
    let test = match at.and_then(|at| rest.split_at_checked(at)) {
        None => Test::Word(rest.to_lowercase()),
        Some((key, values)) if values.starts_with(':') => text_test(key, values.trim_start_matches(':'))?,
        Some((key, number)) => number_test(key, number)?,
    };
    Ok(Term { is_negated, test })
}

fn text_test(key: &str, values: &str) -> Result<Test, String> {
    let key = key.to_lowercase();
    if !TEXT_KEYS.contains(&key.as_str()) {
        let comparable = if NUMBER_KEYS.contains(&key.as_str()) { " (compare it: ram>80%)" } else { "" };
        return Err(format!("there is no '{key}:'{comparable}; there are {}", TEXT_KEYS.join(", ")));
    }
    let values: Vec<String> = values.split(',').map(str::to_lowercase).collect();
    if values.iter().any(String::is_empty) {
        return Err(format!("a value of '{key}:' is empty"));
    }
    let known: &[&str] = match key.as_str() {
        "is" => &IS,
        "state" => &MachineState::ALL.map(MachineState::name),
        _ => &[],
    };
    if let Some(other) = values.iter().find(|value| !known.is_empty() && !known.contains(&value.as_str())) {
        return Err(format!("there is no '{key}:{other}'; there are {}", known.join(", ")));
    }
    Ok(Test::Text { key, values })
}

fn number_test(key: &str, rest: &str) -> Result<Test, String> {
    let key = key.to_lowercase();
    if !NUMBER_KEYS.contains(&key.as_str()) {
        return Err(format!("'{key}' is no number; these are: {}", NUMBER_KEYS.join(", ")));
    }
    let comparisons = [
        ("<=", Comparison::LessOrEqual),
        (">=", Comparison::GreaterOrEqual),
        ("<", Comparison::Less),
        (">", Comparison::Greater),
    ];
    let found =
        comparisons.into_iter().find_map(|(sign, comparison)| Some((rest.strip_prefix(sign)?, comparison)));
    let Some((text, comparison)) = found else { return Err(format!("'{key}{rest}' compares with nothing")) };
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == '%');
    let (factor, unit) = match text.get(digits.len()..).unwrap_or_default().to_lowercase().as_str() {
        "" | "s" => (1.0, Unit::Plain),
        "%" => (1.0, Unit::Percent),
        "k" => (1024.0, Unit::Plain),
        "m" => (1024.0 * 1024.0, Unit::Plain),
        "g" => (1024.0 * 1024.0 * 1024.0, Unit::Plain),
        "t" => (1024.0 * 1024.0 * 1024.0 * 1024.0, Unit::Plain),
        other => return Err(format!("'{other}' is no unit; there are %, s, K, M, G, T")),
    };
    if unit == Unit::Percent && !matches!(key.as_str(), "ram" | "disk") {
        return Err(format!("'{key}' has no limit to take a share of"));
    }
    match digits.parse::<f64>() {
        Ok(number) if number.is_finite() => {
            Ok(Test::Number { key, comparison, number: number * factor, unit })
        }
        _ => Err(format!("'{text}' is no number")),
    }
}

impl Test {
    fn matches(&self, machine: &Machine) -> bool {
        match self {
            Self::Word(word) => machine.name.to_lowercase().contains(word.as_str()),
            Self::Text { key, values } => values.iter().any(|value| has(machine, key, value)),
            Self::Number { key, comparison, number, unit } => {
                measure(machine, key, *unit).is_some_and(|measured| match comparison {
                    Comparison::Less => measured < *number,
                    Comparison::LessOrEqual => measured <= *number,
                    Comparison::Greater => measured > *number,
                    Comparison::GreaterOrEqual => measured >= *number,
                })
            }
        }
    }
}

fn has(machine: &Machine, key: &str, value: &str) -> bool {
    let like = |text: &str| is_like(value, &text.to_lowercase());
    match (key, value) {
        ("name", _) => like(&machine.name),
        ("state", _) => machine.state.name() == value,
        ("catalog", _) => machine.catalog.as_deref().is_some_and(like),
        ("image", _) => like(&machine.image),
        ("version", "old") => machine.old,
        ("version", _) => machine.version.as_deref().is_some_and(like),
        ("mac", _) => like(&machine.mac),
        ("boot", _) => like(machine.boot.name()),
        ("cache", _) => like(machine.cache.mode.name()),
        ("is", "on") => machine.state.is_active(),
        ("is", "off") => !machine.state.is_active(),
        ("is", "pinned") => machine.pin.is_some(),
        ("is", "kept") => machine.kept.is_some(),
        ("is", "editing") => machine.edits.is_some(),
        ("is", "alarm") => machine.alarm.is_some(),
        ("is", "claimed") => machine.claimed_for.is_some(),
        _ => false,
    }
}

/// A number of a machine, if it has it now.
fn measure(machine: &Machine, key: &str, unit: Unit) -> Option<f64> {
    let number = |value: u64| value as f64;
    let share = |used: u64, limit: u64| (limit > 0).then(|| number(used) * 100.0 / number(limit));
    let disk = machine.disk.as_ref();
    match (key, unit) {
        ("ram", Unit::Plain) => disk.map(|disk| number(disk.ram_used_bytes)),
        // The mode `disk` has a few MiB that its settings do not say.
        ("ram", Unit::Percent) if machine.cache.mode == CacheMode::Disk => None,
        ("ram", Unit::Percent) => disk.and_then(|disk| share(disk.ram_used_bytes, machine.cache.ram_bytes)),
        ("disk", Unit::Plain) => disk.map(|disk| number(disk.disk_used_bytes)),
        ("disk", Unit::Percent) => {
            disk.and_then(|disk| share(disk.disk_used_bytes, machine.cache.disk_bytes))
        }
        ("iops", Unit::Plain) => disk.map(|disk| number(disk.iops)),
        ("boot", Unit::Plain) => machine.boot_ms.map(|ms| number(ms) / 1000.0),
        ("memory", Unit::Plain) => Some(number(machine.memory_bytes)),
        _ => None,
    }
}

/// Whether a text is like a pattern, in which `*` stands for any characters.
fn is_like(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = rest.get(at + part.len()..).unwrap_or_default();
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::machine::{Alarm, BootFrom, CacheSettings, DiskCounters, DiskTransport, Identity, Wanted};
    use crate::platform::{Display, Firmware, Network};

    fn machine(name: &str) -> Machine {
        Machine {
            name: name.to_owned(),
            uuid: Uuid::nil(),
            mac: "52:54:00:00:00:01".to_owned(),
            boot: BootFrom::Vm,
            image: "debian:test".to_owned(),
            catalog: Some("class".to_owned()),
            pin: None,
            version: Some("debian@3".to_owned()),
            next_version: None,
            old: false,
            kept: None,
            edits: None,
            cache: CacheSettings { ram_bytes: 100 << 20, ..CacheSettings::default() },
            transport: DiskTransport::default(),
            memory_bytes: 1 << 30,
            cpus: 1,
            firmware: Firmware::default(),
            display: Display::default(),
            display_socket: None,
            network: Network::default(),
            claimed_for: None,
            wanted: Wanted::Running,
            state: MachineState::Running,
            reason: None,
            boot_ms: Some(12_500),
            started_at_ms: None,
            created_at_ms: 0,
            identity: Identity {
                host_name: name.to_owned(),
                machine_id: String::new(),
                ssh_host_key_public: String::new(),
                user_data: None,
            },
            warning: None,
            alarm: None,
            disk: Some(DiskCounters { ram_used_bytes: 90 << 20, iops: 7, ..DiskCounters::default() }),
            pid: None,
            accelerator: None,
        }
    }

    fn matches(filter: &str, machine: &Machine) -> bool {
        Filter::parse(filter).unwrap_or_else(|e| panic!("{e}")).matches(machine)
    }

    #[test]
    fn all_terms_must_match() {
        let desk = machine("Desk-07");
        for filter in [
            "",
            "desk",
            "name:desk-*",
            "name:*07",
            "name:d*-0*7",
            "state:running,booting catalog:CLASS",
            "-version:old version:debian@3",
            "ram>80% ram<=90% ram>=90M ram<91M",
            "iops<8 boot>12 boot<=12.5s memory>=1G",
            "image:\"debian:test\" is:on -is:alarm -is:kept",
            "boot:vm cache:ram+disk",
        ] {
            assert!(matches(filter, &desk), "{filter}");
            let negated = format!("{filter} -name:desk-07");
            assert!(!matches(&negated, &desk), "{negated}");
        }
        for filter in
            ["desk catalog:other", "name:desk", "name:d*x*7", "ram>90%", "state:stopped", "is:off", "disk>1%"]
        {
            assert!(!matches(filter, &desk), "{filter}");
        }
    }

    #[test]
    fn what_a_machine_does_not_have_matches_no_comparison() {
        let mut off = machine("a");
        off.disk = None;
        off.state = MachineState::Stopped;
        off.old = true;
        let message = String::new();
        off.alarm = Some(Alarm { subject: String::new(), since_ms: 0, message, advice: String::new() });
        assert!(!matches("ram<1", &off) && !matches("ram>=0", &off));
        assert!(matches("-ram>=0 is:off version:old is:alarm", &off));
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_what_there_is() {
        for (filter, word) in [
            ("colour:red", "name, state"),
            ("state:sleeping", "booting"),
            ("is:big", "pinned"),
            ("ram:80", "compare it"),
            ("name>3", "iops"),
            ("ram>", "no number"),
            ("ram>x", "unit"),
            ("iops>5%", "no limit"),
            ("ram>8X", "unit"),
            ("name:", "empty"),
            ("name:a,,b", "empty"),
            ("-", "nothing follows"),
            ("name:\"a b", "quotation mark"),
        ] {
            let problem = Filter::parse(filter).unwrap_err();
            assert!(
                problem.kind == ProblemKind::Invalid && problem.message.contains(word),
                "{filter}: {problem}"
            );
        }
        assert!(Filter::parse(&"x".repeat(MAX_FILTER_BYTES + 1)).is_err());
    }

    #[test]
    fn no_text_breaks_it() {
        let desk = machine("desk");
        let mut seed = 1u64;
        let alphabet: Vec<char> = "a:-,*\"<>= %8kM\u{e9}".chars().collect();
        for _ in 0..20_000 {
            let mut text = String::new();
            for _ in 0..12 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                text.push(alphabet[usize::try_from(seed >> 33).unwrap() % alphabet.len()]);
            }
            if let Ok(filter) = Filter::parse(&text) {
                filter.matches(&desk);
            }
        }
    }
}
