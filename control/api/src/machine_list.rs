//! The list of machines that a catalog gets, with names and network addresses, and its form as a CSV file. The CLI reads the file, and the
//! daemon checks the list again.
//!
//! ```text
//!   name,mac,address,gateway,dns
//!   class-01,52:54:00:77:00:01,10.1.2.31/24,10.1.2.1,10.1.2.2 10.1.2.3
//!   class-02,52:54:00:77:00:02,,,
//! ```

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::fixed_address::{FixedAddress, parse_ip};
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
    /// Its fixed IP address. Absent: its guest asks a DHCP server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<FixedAddress>,
}

/// The columns of a file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Column {
    Name,
    Mac,
    Address,
    Gateway,
    Dns,
}

fn wrong(line: u32, why: impl std::fmt::Display) -> Problem {
    Problem::new(ProblemKind::Invalid, format!("line {line}: {why}"))
}

/// The error of something in a line.
fn in_line(line: u32, problem: Problem) -> Problem {
    Problem { message: format!("line {line}: {}", problem.message), ..problem }
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
        let mut machine = ListedMachine { line, name: String::new(), mac: None, address: None };
        let (mut address, mut gateway, mut dns) = ("", "", "");
        for (column, value) in columns.iter().zip(values) {
            match column {
                Column::Name => machine.name = value.to_owned(),
                Column::Mac => machine.mac = Some(value.to_owned()).filter(|mac| !mac.is_empty()),
                Column::Address => address = value,
                Column::Gateway => gateway = value,
                Column::Dns => dns = value,
            }
        }
        machine.address = fixed_address(address, gateway, dns).map_err(|problem| in_line(line, problem))?;
        machines.push(machine);
    }
    check(machines)
}

/// The valid first lines.
const COLUMNS: &str =
    "the first line must name the columns: 'name', and any of 'mac', 'address', 'gateway', 'dns'";

fn column(line: u32, title: &str) -> Result<Column, Problem> {
    match title.to_ascii_lowercase().as_str() {
        "name" => Ok(Column::Name),
        "mac" => Ok(Column::Mac),
        "address" => Ok(Column::Address),
        "gateway" => Ok(Column::Gateway),
        "dns" => Ok(Column::Dns),
        _ => Err(wrong(line, format!("there is no column '{}'", title.escape_debug())).advise(COLUMNS)),
    }
}

/// The fixed address of a line, or `None` if its values are empty.
fn fixed_address(address: &str, gateway: &str, dns: &str) -> Result<Option<FixedAddress>, Problem> {
    if address.is_empty() {
        return match gateway.is_empty() && dns.is_empty() {
            true => Ok(None),
            false => {
                let why = "there is a gateway or a DNS server, but no address";
                Err(Problem::new(ProblemKind::Invalid, why))
            }
        };
    }
    let fixed = FixedAddress::parse(address)?;
    let gateway = if gateway.is_empty() { None } else { Some(parse_ip(gateway)?) };
    let dns = dns.split_whitespace().map(parse_ip).collect::<Result<Vec<_>, _>>()?;
    Ok(Some(FixedAddress { gateway, dns, ..fixed }))
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
        let at_line = |problem| in_line(line, problem);
        name::check_machine(&machine.name).map_err(at_line)?;
        twice(line, &machine.name)?;
        if let Some(mac) = &mut machine.mac {
            *mac = name::check_mac(mac).map_err(at_line)?;
            twice(line, mac)?;
        }
        if let Some(address) = &machine.address {
            address.check().map_err(at_line)?;
            twice(line, &address.ip.to_string())?;
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
            address: None,
        };
        let expected = [listed(2, "class-01", Some("52:54:00:ab:cd:01")), listed(4, "class-02", None)];
        assert_eq!(parse(text).unwrap(), expected);
        assert_eq!(parse("name\na\n").unwrap(), [listed(2, "a", None)]);
        let text =
            "name,address,gateway,dns\na,10.1.2.31/24,10.1.2.1,\"10.1.2.2 9.9.9.9\"\nb,10.1.2.3/24,,\nc,,,\n";
        let read = parse(text).unwrap();
        let said: Vec<_> = read.iter().map(|it| it.address.as_ref().map(ToString::to_string)).collect();
        let whole = "10.1.2.31/24, gateway 10.1.2.1, DNS 10.1.2.2 9.9.9.9".to_owned();
        assert_eq!(said, [Some(whole), Some("10.1.2.3/24".to_owned()), None]);
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (text, why) in [
            ("", "line 1: the file is empty"),
            ("\n\nname,owner\n", "line 3: there is no column 'owner'"),
            ("name;mac\n", "line 1: there is no column 'name;mac'"),
            ("name,ip\n", "line 1: there is no column 'ip'"),
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
            ("name,address\na,10.1.2.31\n", "line 2: '10.1.2.31' is not an IPv4 address with"),
            ("name,address\na,10.1.2.255/24\n", "line 2: no machine can have the address 10.1.2.255/24"),
            ("name,address\na,10.1.2.3/24\n\nb,10.1.2.3/16\n", "line 4: '10.1.2.3' is in line 2 too"),
            ("name,gateway\na,10.1.2.1\n", "line 2: there is a gateway or a DNS server, but no address"),
            ("name,address,gateway\na,10.1.2.3/24,x\n", "line 2: 'x' is not an IPv4 address"),
            ("name,address,gateway\na,10.1.2.3/24,10.9.9.9\n", "line 2: the gateway 10.9.9.9 is not"),
        ] {
            let refused = parse(text).unwrap_err();
            assert_eq!(refused.kind, ProblemKind::Invalid, "{refused}");
            assert!(refused.message.starts_with(why), "{refused}");
        }
    }
}
