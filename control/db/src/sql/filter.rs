//! Converts filters of lists to SQL conditions. One table for each list maps keys to columns.

use headwater_api::filter::{Comparison, Filter, Test};
use headwater_api::{MachineState, Scopes};

use crate::sql::statement::Value;

/// The column of a key of a filter.
enum Column {
    /// A text column that is matched with patterns.
    Like(&'static str),
    /// A text column with a fixed set of values.
    Is(&'static str),
    /// The version of a catalog's scheme that a machine has: `old`, or a number.
    Scheme,
    /// A number, of which so many make one of the filter.
    Number(&'static str, f64),
}

/// How a row belongs to a catalog or an image.
#[derive(Clone, Copy)]
enum Owner {
    /// The columns `catalog` and `image` of a machine.
    Machine,
    /// The column `subject`, which names an image, a catalog or a machine. A machine must have existed at the time in the
    /// given column, because a machine of another catalog may have had its name before.
    Subject(&'static str),
}

/// The columns of a list.
pub(super) struct Columns {
    /// The text columns that are searched for a word without a key.
    words: &'static [&'static str],
    /// How a row belongs to a catalog or an image.
    owner: Owner,
    keys: &'static [(&'static str, Column)],
}

/// The columns of the view `machines_and_catalogs`.
pub(super) const MACHINES: Columns = Columns {
    words: &["name"],
    owner: Owner::Machine,
    keys: &[
        ("name", Column::Like("name")),
        ("state", Column::Is("state")),
        ("catalog", Column::Like("catalog")),
        ("image", Column::Like("coalesce(catalog_image, image)")),
        ("version", Column::Like("version")),
        ("mac", Column::Like("mac")),
        ("boot", Column::Like("boot")),
        ("boot", Column::Number("boot_ms", 1000.0)),
        ("cache", Column::Like("cache_mode")),
        ("scheme", Column::Scheme),
        ("memory", Column::Number("memory_bytes", 1.0)),
    ],
};

/// The columns of the table `events`.
pub(super) const EVENTS: Columns = Columns {
    words: &["subject", "detail"],
    owner: Owner::Subject("at_ms"),
    keys: &[
        ("subject", Column::Like("subject")),
        ("action", Column::Like("action")),
        ("caller", Column::Like("caller")),
    ],
};

/// The columns of the table `tasks`.
pub(super) const TASKS: Columns = Columns {
    words: &["subject"],
    owner: Owner::Subject("created_at_ms"),
    keys: &[
        ("state", Column::Is("state")),
        ("kind", Column::Like("kind")),
        ("subject", Column::Like("subject")),
        ("caller", Column::Like("caller")),
    ],
};

/// The condition for `is:` of a machine. Unknown values match nothing.
fn is(value: &str) -> String {
    let active = |not: &str| {
        let names = MachineState::ALL.into_iter().filter(|state| state.is_active()).map(MachineState::name);
        format!("state {not} IN ('{}')", names.collect::<Vec<_>>().join("', '"))
    };
    let has = |table: &str| format!("EXISTS (SELECT 1 FROM {table} AND machine = uuid)");
    match value {
        "on" => active(""),
        "off" => active("NOT"),
        "pinned" => "(pin IS NOT NULL OR catalog_pin IS NOT NULL)".to_owned(),
        "kept" => format!("(cache_persistent AND {})", has("persistent_disks WHERE purpose = 'persistent'")),
        "editing" => has("persistent_disks WHERE purpose = 'edit'"),
        "claimed" => has("claims WHERE TRUE"),
        _ => "FALSE".to_owned(),
    }
}

/// An SQL condition and its values.
pub(super) struct Condition {
    pub(super) text: String,
    pub(super) values: Vec<Value>,
    /// The number of values before them in the statement.
    before: usize,
}

impl Condition {
    /// The condition of a filter, in a statement that already has `before` values.
    pub(super) fn of(filter: &Filter, columns: &Columns, before: usize) -> Self {
        let mut condition = Self { text: "TRUE".to_owned(), values: Vec::new(), before };
        for term in filter.terms() {
            let parts = condition.parts(&term.test, columns);
            // NULL matches no test, and so matches the negation of each.
            let test = format!("coalesce({}, FALSE)", if parts.is_empty() { "FALSE" } else { &parts });
            condition.text.push_str(if term.is_negated { " AND NOT " } else { " AND " });
            condition.text.push_str(&test);
        }
        condition
    }

    /// Adds a condition with AND. `?` stands for its value.
    pub(super) fn and(mut self, text: &str, values: Vec<Value>) -> Self {
        self.text.push_str(" AND ");
        let mut values = values.into_iter();
        for (n, part) in text.split('?').enumerate() {
            if n > 0
                && let Some(value) = values.next()
            {
                let number = self.value(value);
                self.text.push_str(&number);
            }
            self.text.push_str(part);
        }
        self
    }

    /// Adds a value, and returns its number.
    pub(super) fn value(&mut self, value: impl Into<Value>) -> String {
        self.values.push(value.into());
        format!("${}", self.before + self.values.len())
    }

    /// Alternatives, at least one of which must be true.
    fn parts(&mut self, test: &Test, columns: &Columns) -> String {
        let parts: Vec<String> = match test {
            Test::Word(word) => {
                let number = self.value(format!("%{}%", escaped(word)));
                columns.words.iter().map(|column| like(column, &number)).collect()
            }
            Test::Within(scopes) => match columns.owner {
                Owner::Machine => self.machines_within(scopes),
                Owner::Subject(time) => self.subjects_within(scopes, time),
            },
            Test::Text { key, values } if key == "is" => values.iter().map(|value| is(value)).collect(),
            Test::Text { key, values } => {
                values.iter().filter_map(|value| self.text(key, value, columns)).collect()
            }
            Test::Number { key, comparison, number, .. } => {
                self.number(key, *comparison, *number, columns).into_iter().collect()
            }
        };
        parts.join(" OR ")
    }

    /// Conditions for machines within scopes.
    fn machines_within(&mut self, scopes: &Scopes) -> Vec<String> {
        let mut parts = Vec::new();
        for pattern in &scopes.catalogs {
            let number = self.value(pattern_of(pattern));
            parts.push(like("catalog", &number));
        }
        for pattern in &scopes.images {
            let images = self.images_like("image", "", pattern);
            parts.push(format!("(catalog IS NULL AND ({images}))"));
        }
        parts
    }

    /// The condition that a column contains the name of an image that matches a pattern, or a reference to a version of
    /// that image.
    fn images_like(&mut self, column: &str, before: &str, pattern: &str) -> String {
        let [name, channel, version] = ["", ":*", "@*"].map(|end| {
            let number = self.value(pattern_of(&format!("{before}{pattern}{end}")));
            like(column, &number)
        });
        // `debian` must match `debian:test`, but not `debian2`.
        let is_name = format!("{column} NOT LIKE '%:%' AND {column} NOT LIKE '%@%'");
        format!("({name} AND {is_name}) OR {channel} OR {version}")
    }

    /// Conditions for subjects within scopes. `time` is the column with the time of the row.
    fn subjects_within(&mut self, scopes: &Scopes, time: &str) -> Vec<String> {
        let mut parts = Vec::new();
        for pattern in &scopes.catalogs {
            let number = self.value(pattern_of(&format!("catalog {pattern}")));
            parts.push(like("subject", &number));
        }
        for pattern in &scopes.images {
            parts.push(self.images_like("subject", "image ", pattern));
        }
        let machines = self.machines_within(scopes).join(" OR ");
        if !machines.is_empty() {
            let (first, rows) = (
                "machine ".len() + 1,
                "SELECT name, catalog, image, created_at_ms AS since_ms FROM machines",
            );
            parts.push(format!(
                "(subject LIKE 'machine %' AND EXISTS (SELECT 1 FROM ({rows}) AS m
                 WHERE name = substr(subject, {first}) AND since_ms <= {time} AND ({machines})))"
            ));
        }
        parts
    }

    fn text(&mut self, key: &str, value: &str, columns: &Columns) -> Option<String> {
        columns.keys.iter().filter(|(name, _)| *name == key).find_map(|(_, column)| match column {
            Column::Like(column) => {
                let number = self.value(pattern_of(value));
                Some(like(column, &number))
            }
            Column::Is(column) => Some(format!("{column} = {}", self.value(value))),
            Column::Scheme if value == "old" => Some("scheme < catalog_scheme".to_owned()),
            Column::Scheme => value.parse::<u32>().ok().map(|version| format!("scheme = {version}")),
            Column::Number(..) => None,
        })
    }

    fn number(
        &mut self,
        key: &str,
        comparison: Comparison,
        number: f64,
        columns: &Columns,
    ) -> Option<String> {
        columns.keys.iter().filter(|(name, _)| *name == key).find_map(|(_, column)| match column {
            Column::Number(column, factor) => {
                let bound = number * factor;
                // The column has integers.
                let (sign, bound) = match comparison {
                    Comparison::Less => ("<", bound.ceil()),
                    Comparison::LessOrEqual => ("<=", bound.floor()),
                    Comparison::Greater => (">", bound.floor()),
                    Comparison::GreaterOrEqual => (">=", bound.ceil()),
                };
                Some(format!("{column} {sign} {}", self.value(bound as i64)))
            }
            _ => None,
        })
    }
}

fn like(column: &str, number: &str) -> String {
    // In SQLite `LIKE` ignores the case of a to z, in PostgreSQL it does not.
    format!("lower({column}) LIKE {number} ESCAPE '!'")
}

/// Converts a pattern, in which `*` stands for any characters, to `LIKE` syntax.
fn pattern_of(text: &str) -> String {
    escaped(text).replace('*', "%")
}

/// Escapes a text so that it matches only itself.
fn escaped(text: &str) -> String {
    text.replace('!', "!!").replace('%', "!%").replace('_', "!_")
}
