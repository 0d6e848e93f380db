//! `headwater size`: lists the sizes of virtual machines in Azure that can hold an OS disk, from a table, without a
//! daemon.

use headwater_api::{Problem, ProblemKind};
use headwater_sizes::size::gib;
use headwater_sizes::{Advice, MachineSize, Question, advice, advise as ask};
use serde::Serialize;

use crate::cli::AdviseArgs;
use crate::cmd::size_table::{self, HEADINGS, Origin, cells, decimal, unknown};
use crate::show;

/// The number of sizes that are shown, and of examples of other sizes, without --all.
const SHOWN_SIZES: usize = 20;
const SHOWN_EXAMPLES: usize = 3;

/// The advice, as JSON.
#[derive(Serialize)]
struct Report<'a> {
    table: &'a Origin,
    question: &'a Question,
    #[serde(flatten)]
    advice: &'a Advice<'a>,
}

/// Lists the sizes that can hold an OS disk, and says why others cannot.
pub fn advise(args: &AdviseArgs, json: bool) -> anyhow::Result<()> {
    let (table, origin) = size_table::load(&args.table)?;
    let question = Question {
        image: size_table::image_facts(args.image),
        places: args.places.clone(),
        full_copy: args.full_copy,
        trusted_launch: args.trusted_launch,
        temp_left_bytes: args.temp_left,
        vcpus_min: args.vcpus,
        memory_min_bytes: args.memory,
        today: size_table::today()?,
    };
    let advice = ask(&table, &question).map_err(|wrong| {
        let why = Problem::new(ProblemKind::Invalid, wrong.to_string());
        why.during("cannot advise on sizes").advise(wrong.advice())
    })?;
    let printed = match json {
        true => show::json(&Report { table: &origin, question: &question, advice: &advice }),
        false => show_advice(&advice, &origin, args.all),
    };
    show::if_read(printed)?;
    if advice.fitting.is_empty() {
        let why = format!("no size of the table holds {question}");
        let advice = "ask for less, or for more places; --all shows why each size does not fit, and --sizes FILE uses another table";
        return Err(Problem::new(ProblemKind::Invalid, why).advise(advice).into());
    }
    Ok(())
}

fn show_advice(advice: &Advice<'_>, origin: &Origin, all: bool) -> anyhow::Result<()> {
    let shown = if all { advice.fitting.len() } else { SHOWN_SIZES };
    if !advice.fitting.is_empty() {
        let headings = [&["SIZE", "VCPUS", "MEMORY"], &HEADINGS[..], &["BOOTS GEN", "USD/H"]].concat();
        show::table(&headings, advice.fitting.iter().take(shown).map(row))?;
    }
    if let Some(more) = advice.fitting.len().checked_sub(shown).filter(|more| *more > 0) {
        show::line(&format!("and {more} larger sizes, which --all shows"))?;
    }
    if !advice.others.is_empty() {
        show::line("")?;
        show_others(advice, all)?;
    }
    show::line(&format!("\n{}", show::printable(&origin.to_string())))
}

fn row(fitting: &advice::Fitting<'_>) -> Vec<String> {
    let MachineSize { name, vcpus_available, memory_bytes, .. } = fitting.size;
    let mut row = vec![name.clone(), vcpus_available.to_string(), gib(*memory_bytes)];
    row.extend(cells(&fitting.placement));
    row.push(fitting.size.generations_text());
    row.push(fitting.size.micro_usd_per_hour.map_or_else(unknown, |price| decimal(price, 4)));
    row
}

fn show_others(advice: &Advice<'_>, all: bool) -> anyhow::Result<()> {
    if all {
        let rows = advice.others.iter().map(|other| vec![other.size.to_owned(), other.reasons.to_string()]);
        return show::table(&["OTHER SIZE", "WHY NOT"], rows);
    }
    let groups = advice.groups();
    let rows = groups.iter().map(|group| {
        let mut examples: Vec<&str> = group.sizes.iter().copied().take(SHOWN_EXAMPLES).collect();
        if group.sizes.len() > SHOWN_EXAMPLES {
            examples.push("..");
        }
        vec![group.sizes.len().to_string(), group.reason.to_owned(), examples.join(", ")]
    });
    show::table(&["OTHERS", "WHY NOT", "SIZES"], rows)
}
