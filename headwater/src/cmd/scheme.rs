//! `headwater scheme check`: validates a provisioning scheme for Azure VMs (size, backup sizes, placement of the OS
//! disk) against the table of VM sizes. It creates nothing.

use headwater_api::{Problem, ProblemKind};
use headwater_sizes::scheme::{Landing, MAX_SCHEME_BYTES, Scheme, SchemeRefusal, SchemeReport};
use serde::Serialize;

use crate::cli::CheckSchemeArgs;
use crate::cmd::size_table::{self, HEADINGS, Origin, cells};
use crate::failure::invalid;
use crate::show;

/// The result of the check, as JSON.
#[derive(Serialize)]
struct Report<'a> {
    table: &'a Origin,
    scheme: &'a Scheme,
    #[serde(flatten)]
    report: &'a SchemeReport,
}

/// Prints on which sizes and in which place the OS disk would be, warnings, and errors.
pub fn check(args: CheckSchemeArgs, json: bool) -> anyhow::Result<()> {
    let CheckSchemeArgs { file, image, scheme, table } = args;
    let (table, origin) = size_table::load(&table)?;
    let (scheme, name) = match &file {
        None => (scheme.scheme(), "the scheme".to_owned()),
        Some(path) => {
            let text = size_table::read_text("the scheme", path, MAX_SCHEME_BYTES)?;
            let wrong = |why| invalid(format!("cannot read the scheme {}: {why}", path.display()));
            (Scheme::parse(&text).map_err(wrong)?, format!("the scheme {}", path.display()))
        }
    };
    let report = scheme.check(size_table::image_facts(image), &table, size_table::today()?);
    let printed = match json {
        true => show::json(&Report { table: &origin, scheme: &scheme, report: &report }),
        false => show_report(&report, &origin),
    };
    show::if_read(printed)?;
    refused(&name, &report.refusals)
}

fn show_report(report: &SchemeReport, origin: &Origin) -> anyhow::Result<()> {
    if report.landings.is_empty() {
        return Ok(());
    }
    let headings = [&["SIZE", "TRIED"], &HEADINGS[..]].concat();
    show::table(&headings, report.landings.iter().map(row))?;
    for warning in &report.warnings {
        show::line(&format!("warning: {}", show::printable(warning)))?;
    }
    show::line(&show::printable(&origin.to_string()))
}

fn row(landing: &Landing) -> Vec<String> {
    let tried = if landing.is_backup { "backup" } else { "first" };
    let mut row = vec![landing.size.clone(), tried.to_owned()];
    match &landing.placement {
        Some(placement) => row.extend(cells(placement)),
        None => row.push("none".to_owned()),
    }
    row
}

/// Combines all refusals in one error.
fn refused(name: &str, refusals: &[SchemeRefusal]) -> anyhow::Result<()> {
    let joined = |part: fn(&SchemeRefusal) -> &str| {
        let mut parts: Vec<&str> = Vec::new();
        for text in refusals.iter().map(part) {
            if !parts.contains(&text) {
                parts.push(text);
            }
        }
        parts.join("; ")
    };
    let kind = match refusals.first() {
        None => return Ok(()),
        Some(first) if first.is_not_found => ProblemKind::NotFound,
        Some(_) => ProblemKind::Invalid,
    };
    let why = format!("{name} is not possible: {}", joined(|refusal| &refusal.what));
    Err(Problem::new(kind, why).advise(joined(|refusal| &refusal.advice)).into())
}
