//! User data with the values of its machine: a text whose first line is `## template: headwater` has names in double braces, which are
//! replaced once, when the machine is created.
//!
//! ```text
//!   ## template: headwater
//!   #cloud-config
//!   fqdn: {{ machine.host_name }}.lab.example.com      ->   fqdn: class-07.lab.example.com
//! ```
//!
//! | name | value |
//! |---|---|
//! | `machine.name` | the name of the machine |
//! | `machine.host_name` | the host name of its guest |
//! | `machine.catalog` | its catalog; empty if it has none |
//! | `machine.number` | the digits at the end of its name; empty if there are none |
//! | `machine.mac` | the address of its network card |
//! | `machine.uuid` | its UUID |
//!
//! A name that is not in this table is an error: a guest must not find half a template. A text with another first line stays as it is, so
//! `## template: jinja` stays a matter of cloud-init.

use headwater_api::{Problem, ProblemKind};

/// The first line of a template.
const FIRST_LINE: &str = "## template: headwater";

/// The values of a machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Values<'a> {
    pub(crate) name: &'a str,
    pub(crate) host_name: &'a str,
    pub(crate) catalog: &'a str,
    pub(crate) mac: &'a str,
    pub(crate) uuid: &'a str,
}

impl<'a> Values<'a> {
    /// Values of no machine, to find mistakes in a template.
    const SAMPLE: Values<'static> = Values { name: "a-1", host_name: "a-1", catalog: "a", mac: "", uuid: "" };

    fn get(&self, name: &str) -> Option<&'a str> {
        let digits = || self.name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        Some(match name {
            "machine.name" => self.name,
            "machine.host_name" => self.host_name,
            "machine.catalog" => self.catalog,
            "machine.number" => self.name.get(digits()..).unwrap_or_default(),
            "machine.mac" => self.mac,
            "machine.uuid" => self.uuid,
            _ => return None,
        })
    }
}

/// The names, for errors.
const NAMES: &str =
    "machine.name, machine.host_name, machine.catalog, machine.number, machine.mac and machine.uuid";

/// User data for a machine. A text that is no template stays as it is.
pub(crate) fn render(text: &str, values: &Values<'_>) -> Result<String, Problem> {
    let (first, body) = text.split_once('\n').unwrap_or((text, ""));
    if first.trim_end() != FIRST_LINE {
        return Ok(text.to_owned());
    }
    let mut rendered = String::with_capacity(body.len());
    for (number, line) in (2..).zip(body.split_inclusive('\n')) {
        let mut rest = line;
        while let Some((before, after)) = rest.split_once("{{") {
            let refused = |why: String| {
                let message = format!("the template in the user data has a mistake in line {number}: {why}");
                Problem::new(ProblemKind::Invalid, message).advise(format!("the names are {NAMES}"))
            };
            let (name, following) =
                after.split_once("}}").ok_or_else(|| refused("'{{' without '}}'".to_owned()))?;
            let name = name.trim();
            let value = values.get(name);
            rendered.push_str(before);
            rendered.push_str(value.ok_or_else(|| refused(format!("'{}' is unknown", name.escape_debug())))?);
            rest = following;
        }
        rendered.push_str(rest);
    }
    Ok(rendered)
}

/// User data as it is for some machine: to find mistakes in a template, and what is left without its first line.
pub(crate) fn sample(text: &str) -> Result<String, Problem> {
    render(text, &Values::SAMPLE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: Values<'static> = Values {
        name: "class-07",
        host_name: "class-07.lab",
        catalog: "class",
        mac: "52:54:00:00:00:07",
        uuid: "u",
    };

    #[test]
    fn names_are_replaced_in_templates_only() {
        let text = "## template: headwater\n#!/bin/sh\n{{machine.name}} {{ machine.number }}{{ machine.catalog }}\n{{ machine.mac }}";
        assert_eq!(render(text, &VALUES).unwrap(), "#!/bin/sh\nclass-07 07class\n52:54:00:00:00:07");
        let of = |name: &str| render(&format!("{FIRST_LINE}\n{{{{{name}}}}}"), &VALUES).unwrap();
        assert_eq!([of("machine.host_name"), of("machine.uuid")], ["class-07.lab", "u"]);
        let unnumbered = Values { name: "desk", ..VALUES };
        assert_eq!(render("## template: headwater\n<{{machine.number}}>", &unnumbered).unwrap(), "<>");
        for text in
            ["", "#cloud-config\n{{ machine.name }}\n", "## template: jinja\n#cloud-config\n{{ v1.x }}"]
        {
            assert_eq!(render(text, &VALUES).unwrap(), text);
        }
    }

    #[test]
    fn mistakes_are_named_with_their_line() {
        for (body, why) in [
            ("#cloud-config\na: {{ machine.nmae }}\n", "line 3: 'machine.nmae' is unknown"),
            ("a\nb\n{{ machine.name\n}}", "line 4: '{{' without '}}'"),
            ("{{}}", "line 2: '' is unknown"),
        ] {
            let refused = sample(&format!("{FIRST_LINE}\n{body}")).unwrap_err();
            assert!(refused.message.contains(why), "{refused}");
            assert!(refused.advice.is_some_and(|advice| advice.contains("machine.number")));
        }
    }

    #[test]
    fn values_are_not_templates_themselves() {
        let odd = Values { catalog: "{{machine.uuid}}", ..VALUES };
        assert_eq!(render("## template: headwater\n{{machine.catalog}}", &odd).unwrap(), "{{machine.uuid}}");
    }
}
