//! The filter language of lists, shared by the API, the command line and the console. The database evaluates the
//! terms about stored columns ([`Filter::stored`]), also `state:`. The other terms ([`Filter::live`]) are about values
//! that only the running daemon knows: use of the write cache, IOPS, alarms, and whether the version is outdated.
//!
//! ```text
//!   filter = term*                      all terms must match
//!   term   = ["-"] (word | key ":" value ("," value)* | key ("<" | "<=" | ">" | ">=") number)
//!   value  = text with "*" for any characters, or "text with blanks"
//!   number = decimal number, with an optional unit: %, s, K, M, G, T (K = 1024)
//! ```
//!
//! Example: `state:running,booting catalog:class version:old ram>80% -name:test-*`. A word alone matches machines whose
//! name contains it, tasks whose subject contains it, and events whose subject or detail contains it. Upper and lower
//! case letters match each other.

use crate::machine::{CacheMode, Machine, MachineState};
use crate::problem::{Problem, ProblemKind};
use crate::scopes::Scopes;
use crate::task::TaskState;

/// The longest filter.
pub const MAX_FILTER_BYTES: usize = 4096;

/// The keys by which a list can be filtered.
#[derive(Clone, Copy, Debug)]
struct Keys {
    /// The keys with text values.
    texts: &'static [&'static str],
    /// The keys with numbers.
    numbers: &'static [&'static str],
    /// The permitted values of `state:`.
    states: &'static [&'static str],
    example: &'static str,
}

/// The keys of machines. The text of `boot` is where the machine boots from; its number is how many seconds the last
/// boot took.
const MACHINES: Keys = Keys {
    texts: &["name", "state", "catalog", "image", "version", "mac", "boot", "cache", "scheme", "is"],
    numbers: &["ram", "disk", "iops", "boot", "memory"],
    states: &MACHINE_STATES,
    example: "state:running catalog:class version:old ram>80% -name:test-*",
};

const MACHINE_STATES: [&str; MachineState::ALL.len()] = {
    let mut names = [""; MachineState::ALL.len()];
    let mut n = 0;
    while n < names.len() {
        names[n] = MachineState::ALL[n].name();
        n += 1;
    }
    names
};

/// The keys of tasks.
const TASKS: Keys = Keys {
    texts: &["state", "kind", "subject", "caller"],
    numbers: &[],
    states: &TASK_STATES,
    example: "state:running,waiting kind:roll -subject:\"catalog class\"",
};

const TASK_STATES: [&str; TaskState::ALL.len()] = {
    let mut names = [""; TaskState::ALL.len()];
    let mut n = 0;
    while n < names.len() {
        names[n] = TaskState::ALL[n].name();
        n += 1;
    }
    names
};

/// The keys of events.
const EVENTS: Keys = Keys {
    texts: &["subject", "action", "caller"],
    numbers: &[],
    states: &[],
    example: "subject:\"machine pc-*\" action:created,removed -caller:daemon",
};

/// The permitted values of `is:`.
const IS: [&str; 7] = ["on", "off", "pinned", "kept", "editing", "alarm", "claimed"];

/// A parsed filter.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Filter(Vec<Term>);

/// A term of a filter.
#[derive(Clone, Debug, PartialEq)]
pub struct Term {
    /// Whether the term matches rows that do not match the test.
    pub is_negated: bool,
    /// What is tested.
    pub test: Test,
}

/// The test of a term. All texts are in lower case.
#[derive(Clone, Debug, PartialEq)]
pub enum Test {
    /// The name (of a task or event: the subject) contains this.
    Word(String),
    /// The text of a key matches one of the values, in which `*` stands for any characters.
    Text {
        /// A known key.
        key: String,
        /// The values, none of which is empty.
        values: Vec<String>,
    },
    /// A number compares with the given one.
    Number {
        /// A known key.
        key: String,
        /// The comparison.
        comparison: Comparison,
        /// The number to compare with.
        number: f64,
        /// The unit of the number.
        unit: Unit,
    },
    /// The row belongs to a catalog or an image within these scopes.
    Within(Scopes),
}

impl Test {
    /// Whether the test is about a value that is not in the database, because only the running daemon knows it.
    fn is_live(&self) -> bool {
        match self {
            Self::Word(_) | Self::Within(_) => false,
            Self::Text { key, values } => {
                let live = |value: &String| {
                    matches!((key.as_str(), value.as_str()), ("version", "old") | ("is", "alarm"))
                };
                values.iter().any(live)
            }
            Self::Number { key, .. } => matches!(key.as_str(), "ram" | "disk" | "iops"),
        }
    }
}

/// A comparison of numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Comparison {
    /// `<`
    Less,
    /// `<=`
    LessOrEqual,
    /// `>`
    Greater,
    /// `>=`
    GreaterOrEqual,
}

/// The unit of a number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unit {
    /// Bytes, seconds or a count.
    Plain,
    /// A share of a limit.
    Percent,
}

impl Filter {
    /// Parses a filter of machines.
    pub fn parse(text: &str) -> Result<Self, Problem> {
        Self::read(text, MACHINES)
    }

    /// Parses a filter of tasks.
    pub fn parse_for_tasks(text: &str) -> Result<Self, Problem> {
        Self::read(text, TASKS)
    }

    /// Parses a filter of events.
    pub fn parse_for_events(text: &str) -> Result<Self, Problem> {
        Self::read(text, EVENTS)
    }

    fn read(text: &str, keys: Keys) -> Result<Self, Problem> {
        let error = |why| error(text, keys, why);
        if text.len() > MAX_FILTER_BYTES {
            return Err(error(format!("it is longer than {MAX_FILTER_BYTES} bytes")));
        }
        let words = words(text).map_err(error)?;
        let terms: Result<Vec<_>, String> = words.iter().map(|word| term(word, keys)).collect();
        terms.map(Self).map_err(error)
    }

    /// Adds the condition that rows are within a caller's scopes.
    #[must_use]
    pub fn within(mut self, scopes: Option<&Scopes>) -> Self {
        let term = |scopes: &Scopes| Term { is_negated: false, test: Test::Within(scopes.clone()) };
        self.0.extend(scopes.map(term));
        self
    }

    /// The terms, all of which must match.
    pub fn terms(&self) -> &[Term] {
        &self.0
    }

    /// The terms that a database can evaluate.
    #[must_use]
    pub fn stored(&self) -> Self {
        Self(self.0.iter().filter(|term| !term.test.is_live()).cloned().collect())
    }

    /// The other terms: about use of the write cache, IOPS, alarms, and outdated versions.
    #[must_use]
    pub fn live(&self) -> Self {
        Self(self.0.iter().filter(|term| term.test.is_live()).cloned().collect())
    }

    /// Whether a term is about the states of machines (`state:`, `is:on`, `is:off`). The database evaluates such terms
    /// with the stored states. If a host is lost, states other than the stored ones are shown, so the caller evaluates
    /// them.
    pub fn is_about_state(&self) -> bool {
        self.0.iter().any(|term| match &term.test {
            Test::Text { key, values } if key == "is" => {
                values.iter().any(|value| matches!(value.as_str(), "on" | "off"))
            }
            Test::Text { key, .. } => key == "state",
            Test::Word(_) | Test::Number { .. } | Test::Within(_) => false,
        })
    }

    /// Whether it matches everything.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a machine matches.
    pub fn matches(&self, machine: &Machine) -> bool {
        self.0.iter().all(|term| term.test.matches(machine) != term.is_negated)
    }
}

fn error(text: &str, keys: Keys, why: String) -> Problem {
    let shown: String = text.chars().take(100).collect();
    Problem::new(ProblemKind::Invalid, format!("cannot read the filter '{}': {why}", shown.escape_debug()))
        .advise(format!("write for instance: {}", keys.example))
}

/// The words of a text. Blanks within quotes belong to a word.
fn words(text: &str) -> Result<Vec<String>, String> {
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
        return Err("a closing quotation mark is missing".to_owned());
    }
    if !word.is_empty() {
        words.push(word);
    }
    Ok(words)
}

fn term(word: &str, keys: Keys) -> Result<Term, String> {
    let (rest, is_negated) = word.strip_prefix('-').map_or((word, false), |rest| (rest, true));
    if rest.is_empty() {
        return Err("nothing follows the '-'".to_owned());
    }
    let at = rest.find([':', '<', '>']);
    let test = match at.and_then(|at| rest.split_at_checked(at)) {
        None => Test::Word(rest.to_lowercase()),
        Some((key, values)) if values.starts_with(':') => {
            text_test(key, values.trim_start_matches(':'), keys)?
        }
        Some((key, number)) => number_test(key, number, keys)?,
    };
    Ok(Term { is_negated, test })
}

fn text_test(key: &str, values: &str, keys: Keys) -> Result<Test, String> {
    let key = key.to_lowercase();
    if !keys.texts.contains(&key.as_str()) {
        let comparable = if keys.numbers.contains(&key.as_str()) { " (compare it: ram>80%)" } else { "" };
        return Err(format!("'{key}:' is not a key{comparable}; the keys are {}", keys.texts.join(", ")));
    }
    let values: Vec<String> = values.split(',').map(str::to_lowercase).collect();
    if values.iter().any(String::is_empty) {
        return Err(format!("a value of '{key}:' is empty"));
    }
    let is_scheme = |value: &String| value == "old" || value.parse::<u32>().is_ok();
    if key == "scheme" && !values.iter().all(is_scheme) {
        return Err("'scheme:' must be followed by 'old' or the number of a version".to_owned());
    }
    let known: &[&str] = match key.as_str() {
        "is" => &IS,
        "state" => keys.states,
        _ => &[],
    };
    if let Some(other) = values.iter().find(|value| !known.is_empty() && !known.contains(&value.as_str())) {
        return Err(format!("'{key}:{other}' is not possible; the values are {}", known.join(", ")));
    }
    Ok(Test::Text { key, values })
}

fn number_test(key: &str, rest: &str, keys: Keys) -> Result<Test, String> {
    let key = key.to_lowercase();
    if keys.numbers.is_empty() {
        return Err(format!(
            "'{key}{rest}' is a comparison, but there are only keys with texts here: {}",
            keys.texts.join(", ")
        ));
    }
    if !keys.numbers.contains(&key.as_str()) {
        return Err(format!("'{key}' is not a key with a number; these are: {}", keys.numbers.join(", ")));
    }
    let comparisons = [
        ("<=", Comparison::LessOrEqual),
        (">=", Comparison::GreaterOrEqual),
        ("<", Comparison::Less),
        (">", Comparison::Greater),
    ];
    let found =
        comparisons.into_iter().find_map(|(sign, comparison)| Some((rest.strip_prefix(sign)?, comparison)));
    let Some((text, comparison)) = found else {
        return Err(format!("'{key}{rest}' has no number to compare with"));
    };
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == '%');
    let (factor, unit) = match text.get(digits.len()..).unwrap_or_default().to_lowercase().as_str() {
        "" | "s" => (1.0, Unit::Plain),
        "%" => (1.0, Unit::Percent),
        "k" => (1024.0, Unit::Plain),
        "m" => (1024.0 * 1024.0, Unit::Plain),
        "g" => (1024.0 * 1024.0 * 1024.0, Unit::Plain),
        "t" => (1024.0 * 1024.0 * 1024.0 * 1024.0, Unit::Plain),
        other => return Err(format!("'{other}' is not a unit; the units are %, s, K, M, G, T")),
    };
    if unit == Unit::Percent && !matches!(key.as_str(), "ram" | "disk") {
        return Err(format!("'{key}' has no limit, so it cannot be compared with a percentage"));
    }
    match digits.parse::<f64>() {
        Ok(number) if number.is_finite() => {
            Ok(Test::Number { key, comparison, number: number * factor, unit })
        }
        _ => Err(format!("'{text}' is not a number")),
    }
}

impl Test {
    fn matches(&self, machine: &Machine) -> bool {
        match self {
            Self::Word(word) => machine.name.to_lowercase().contains(word.as_str()),
            Self::Text { key, values } => values.iter().any(|value| has(machine, key, value)),
            Self::Within(scopes) => scopes.has_machine(machine.catalog.as_deref(), &machine.image),
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
        ("scheme", "old") => machine.scheme_old,
        ("scheme", version) => machine.scheme.is_some_and(|own| version.parse() == Ok(own)),
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

/// The value of a number of a machine, if it has one now.
fn measure(machine: &Machine, key: &str, unit: Unit) -> Option<f64> {
    let number = |value: u64| value as f64;
    let share = |used: u64, limit: u64| (limit > 0).then(|| number(used) * 100.0 / number(limit));
    let disk = machine.disk.as_ref();
    match (key, unit) {
        ("ram", Unit::Plain) => disk.map(|disk| number(disk.ram_used_bytes)),
        // In mode `disk` the memory limit is a fixed size that is not in the settings.
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

/// Whether a text matches a pattern, in which `*` stands for any characters.
pub(crate) fn is_like(pattern: &str, text: &str) -> bool {
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
            host: None,
            connection: None,
            cloud: None,
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
            secure_boot: false,
            tpm: false,
            display: Display::default(),
            display_socket: None,
            network: Network::default(),
            scratch_bytes: 0,
            claimed_for: None,
            scheme: Some(2),
            scheme_old: true,
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
                address: None,
                user_data: None,
                personality: std::collections::BTreeMap::new(),
            },
            warning: None,
            fenced: false,
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
            ("ram>", "'' is not a number"),
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
