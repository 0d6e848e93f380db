//! The list of machines that a catalog gets, with names and network addresses, and its form as a CSV file. The CLI reads the file, and the
//! daemon checks the list again.
//!
//! ```text
//!   name,mac
//!   class-01,52:54:00:77:00:01
//!   class-02,52:54:00:77:00:02
//! ```

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::name;
use crate::problem::{Problem, ProblemKind};

/// The most machines of one list.
pub const LISTED_MAX: usize = 10_000;

/// A machine of a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ListedMachine {
    /// The number of its line in a file, or of its place in the list: errors name it.
    pub line: u32,
    /// Its name: 1 to 63 of a-z, 0-9 and '-'.
    pub name: String,
    /// The MAC address of its network card. Absent: it is generated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
}

/// The columns of a file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Column {
    Name,
    Mac,
}

fn wrong(line: u32, why: impl std::fmt::Display) -> Problem {
    Problem::new(ProblemKind::Invalid, format!("line {line}: {why}"))
}

/// Reads the CSV file of a list. Its first line names the columns.
pub fn parse(text: &str) -> Result<Vec<ListedMachine>, Problem> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let numbered = (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty());
    let mut lines = numbered.map(|(number, line)| (number, line.split(',').map(field).collect::<Vec<_>>()));
    let (first, titles) = lines.next().ok_or_else(|| wrong(1, "the file is empty").advise(COLUMNS))?;
    let columns = titles.iter().map(|title| column(first, title)).collect::<Result<Vec<_>, _>>()?;
    for (at, (column, title)) in columns.iter().zip(&titles).enumerate() {
        if columns.iter().take(at).any(|other| other == column) {
            return Err(wrong(first, format!("the column '{title}' is there twice")));
        }
    }
    if !columns.contains(&Column::Name) {
        return Err(wrong(first, "there is no column 'name'").advise(COLUMNS));
    }
    let mut machines = Vec::new();
    for (line, values) in lines {
        if values.len() != columns.len() {
            let (has, needs) = (values.len(), columns.len());
            return Err(wrong(line, format!("there are {has} values, and {needs} columns")));
        }
        let mut machine = ListedMachine { line, name: String::new(), mac: None };
        for (column, value) in columns.iter().zip(values) {
            match column {
                Column::Name => machine.name = value.to_owned(),
                Column::Mac => machine.mac = Some(value.to_owned()).filter(|mac| !mac.is_empty()),
            }
        }
        machines.push(machine);
    }
    check(machines)
}

/// The valid first lines.
const COLUMNS: &str = "the first line must name the columns: 'name', or 'name,mac'";

fn column(line: u32, title: &str) -> Result<Column, Problem> {
    match title.to_ascii_lowercase().as_str() {
        "name" => Ok(Column::Name),
        "mac" => Ok(Column::Mac),
        "address" | "ip" => {
            let advice =
                "leave the column out; the DHCP server of the network gives an address to each MAC address";
            Err(wrong(line, format!("a column '{title}' is not possible: guests ask a DHCP server"))
                .advise(advice))
        }
        _ => Err(wrong(line, format!("there is no column '{}'", title.escape_debug())).advise(COLUMNS)),
    }
}

/// A value, without the quotes that a spreadsheet may write. No valid value has a quote or a comma.
fn field(text: &str) -> &str {
    let text = text.trim();
    text.strip_prefix('"').and_then(|inner| inner.strip_suffix('"')).unwrap_or(text)
}

/// Checks a list: names, addresses, and that none is there twice. Returns it with the addresses in their usual form.
pub fn check(mut machines: Vec<ListedMachine>) -> Result<Vec<ListedMachine>, Problem> {
    if machines.is_empty() {
        return Err(Problem::new(ProblemKind::Invalid, "the list has no machine"));
    }
    if machines.len() > LISTED_MAX {
        let message = format!("the list has {} machines, and {LISTED_MAX} are the most", machines.len());
        return Err(Problem::new(ProblemKind::Invalid, message));
    }
    let mut seen = HashMap::new();
    let mut twice = |line: u32, value: &str| match seen.insert(value.to_owned(), line) {
        Some(other) => Err(wrong(line, format!("'{value}' is in line {other} too"))),
        None => Ok(()),
    };
    for machine in &mut machines {
        let line = machine.line;
        let at_line =
            |problem: Problem| Problem { message: format!("line {line}: {}", problem.message), ..problem };
        name::check_machine(&machine.name).map_err(at_line)?;
        twice(line, &machine.name)?;
        if let Some(mac) = &mut machine.mac {
            *mac = name::check_mac(mac).map_err(at_line)?;
            twice(line, mac)?;
        }
    }
    Ok(machines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_spreadsheets_are_read() {
        let text = "\u{feff}MAC, name\r\n52-54-00-AB-cd-01,\"class-01\"\r\n\r\n,class-02\r\n";
        let listed = |line, name: &str, mac: Option<&str>| ListedMachine {
            line,
            name: name.to_owned(),
            mac: mac.map(str::to_owned),
        };
        let expected = [listed(2, "class-01", Some("52:54:00:ab:cd:01")), listed(4, "class-02", None)];
        assert_eq!(parse(text).unwrap(), expected);
        assert_eq!(parse("name\na\n").unwrap(), [listed(2, "a", None)]);
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, why) in [
            ("", "line 1: the file is empty"),
            ("\n\nname,owner\n", "line 3: there is no column 'owner'"),
            ("name;mac\n", "line 1: there is no column 'name;mac'"),
            ("name,address\n", "line 1: a column 'address' is not possible"),
            ("mac\n", "line 1: there is no column 'name'"),
            ("name,mac,NAME\n", "line 1: the column 'NAME' is there twice"),
            ("name,mac\n", "the list has no machine"),
            ("name,mac\na\n", "line 2: there are 1 values, and 2 columns"),
            ("name,mac\nClass,\n", "line 2: 'Class' is not a machine name"),
            ("name,mac\na,\n\nb,52:54:00\n", "line 4: '52:54:00' is not the MAC address of a network card"),
            ("name,mac\na,\nb,\na,\n", "line 4: 'a' is in line 2 too"),
            (
                "name,mac\na,52:54:00:00:00:01\nb,52-54-00-00-00-01\n",
                "line 3: '52:54:00:00:00:01' is in line 2 too",
            ),
        ] {
            let refused = parse(text).unwrap_err();
            assert_eq!(refused.kind, ProblemKind::Invalid, "{refused}");
            assert!(refused.message.starts_with(why), "{refused}");
        }
    }
}
