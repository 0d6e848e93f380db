//! Writes the results as one self-contained HTML page: a table with a row for each compared figure, and a bar chart for
//! each case.

use std::fmt::Write;

use super::svg::{Bar, bars, escape};
use super::table;
use crate::bench::{CaseResult, Sample, SystemResult};
use crate::statistics;
use crate::targets::Results;

const STYLE: &str = "\
:root{color-scheme:light dark;--ours:#1769aa;--peer:#9aa5b1;--good:#1b7f3b;--bad:#b3261e}\
body{font:15px/1.5 system-ui,sans-serif;max-width:860px;margin:2rem auto;padding:0 1rem}\
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}\
th,td{text-align:left;padding:.25rem .5rem;border-bottom:1px solid #8884}\
td.n,th.n{text-align:right}.yes{color:var(--good)}.NO,.not{color:var(--bad);font-weight:600}.known{font-weight:600}\
svg{width:100%;height:auto}svg text{font-size:12px;fill:currentColor}svg .label{text-anchor:end}\
.ours{fill:var(--ours)}.peer{fill:var(--peer)}.spread{stroke:currentColor;stroke-width:1.5}\
.quiet{opacity:.75}";

/// Writes the page.
pub fn render(results: &Results) -> String {
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\">\
         <title>Headwater beside its peers</title><style>{STYLE}</style>\n\
         <h1>Headwater beside its peers</h1>\n<p class=\"quiet\">{}</p>\n\
         <p>Medians of the rounds of one run, in which the systems took turns. The mix is 4 KiB, 80 % writes, \
         incompressible. Lines in the bars go from the least to the greatest round.</p>\n",
        escape(&results.machine.summary())
    );
    if results.quick {
        page.push_str(
            "<p><b>Quick run: one short round on small sets. The figures say nothing about speed.</b></p>\n",
        );
    }
    page.push_str(&rows(results));
    for case in &results.cases {
        page.push_str(&chart(case));
    }
    page.push_str("</html>\n");
    page
}

fn rows(results: &Results) -> String {
    let mut text = String::from(
        "<table><tr><th>case<th>figure<th class=n>ours<th>rounds<th>peer<th class=n>theirs<th class=n>ratio<th>goal<th>reached\n",
    );
    for row in &results.rows {
        let cells = table::cells(row).map(|cell| escape(&cell));
        let [case, figure, ours, rounds, peer, theirs, ratio, goal, reached] = cells;
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "<tr><td>{case}<td>{figure}<td class=n>{ours}<td>{rounds}<td>{peer}<td class=n>{theirs}<td class=n>{ratio}\
             <td>{goal}<td class=\"{reached}\">{reached}"
        );
    }
    text.push_str("</table>\n");
    for left in &results.left_out {
        let (case, reason) = (escape(&left.case), escape(&left.reason));
        let _ = writeln!(text, "<p class=\"NO\">{case} was skipped: {reason}</p>");
    }
    text
}

fn chart(case: &CaseResult) -> String {
    let mut text = format!("<h2>{}</h2>\n<p class=\"quiet\">{}</p>\n", escape(case.title), case.name);
    text.push_str("<h3>IOPS</h3>\n");
    text.push_str(&plot(case, |sample| Some(sample.fio.iops)));
    text.push_str("<h3>99th percentile of write latency, microseconds</h3>\n");
    text.push_str(&plot(case, |sample| Some(sample.fio.write_p99_us)));
    if case.systems.iter().filter(|system| !system.figures(Sample::cpu_us_per_operation).is_empty()).count()
        > 1
    {
        text.push_str("<h3>CPU of the server, microseconds per operation</h3>\n");
        text.push_str(&plot(case, Sample::cpu_us_per_operation));
    }
    text
}

fn plot(case: &CaseResult, figure: impl Fn(&Sample) -> Option<f64>) -> String {
    let bar = |system: &'static str, samples: &[f64]| {
        let (value, range) = (statistics::median(samples)?, statistics::range(samples)?);
        Some(Bar { label: system, value, range, is_ours: system == "headwater" })
    };
    let all =
        case.systems.iter().filter_map(|system: &SystemResult| bar(system.system, &system.figures(&figure)));
    bars(&all.collect::<Vec<Bar<'_>>>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fio::Measured;
    use crate::targets::{Goal, LeftOut, Row};

    #[test]
    fn the_page_stands_alone_and_shows_what_was_missed() {
        let missed = Row::new("disk", "IOPS", &[1.0], "<raw>", &[2.0], Goal::AtLeast(1.2));
        let known = Row::new("disk", "IOPS", &[2.0], "raw disk", &[2.0], Goal::AtLeast(1.2));
        let left_out = vec![LeftOut { case: "slow-link".into(), reason: "no <line>".into() }];
        let samples =
            vec![Sample { fio: Measured { iops: 77_000.0, ..Measured::default() }, ..Sample::default() }];
        let ours = SystemResult { system: "headwater", samples, peak_resident_bytes: None };
        let (name, title) = ("disk", "a disk");
        let case =
            CaseResult { name, title, set_bytes: 1, depth: 16, percentage_random: 80, systems: vec![ours] };
        let rows = vec![missed, known];
        let page = render(&Results { rows, left_out, cases: vec![case], ..Results::default() });
        assert!(
            page.contains("<h2>a disk</h2>") && page.contains("<svg ") && page.contains(">77000<"),
            "{page}"
        );
        assert!(page.contains("class=\"NO\">NO"));
        assert!(page.contains("class=\"known\">known") && page.contains("decision 15"), "{page}");
        assert!(page.contains("slow-link was skipped: no &lt;line&gt;"));
        assert!(page.contains("&lt;raw&gt;"));
        assert!(!page.contains("http") && !page.contains("<script"));
    }
}
