//! Finds the metrics, labels and states in expressions of Prometheus, and compares them with the list of metrics.

use std::collections::BTreeSet;

use headwater_api::MachineState;
use headwater_api::metrics::{FAMILIES, family};

/// The labels that Prometheus, or the file of an export, adds to each metric.
const ADDED: [&str; 3] = ["job", "instance", "export"];

/// Says what in a text of expressions does not exist.
pub fn unknown(text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    let text = text.replace("\\\"", "\"");
    for (at, _) in text.match_indices("headwater_") {
        let before = text[..at].chars().next_back();
        if before.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_' || c == '/') {
            continue;
        }
        let rest = &text[at..];
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
        let (metric, after) = rest.split_at(end);
        match family(metric) {
            None => problems.push(format!("there is no metric {metric}")),
            Some(family) => {
                for (label, value) in matchers(after) {
                    if !family.labels.contains(&label) && !ADDED.contains(&label) {
                        problems.push(format!("{metric} has no label {label}"));
                    } else if label == "state" && !value.contains('$') {
                        let odd = value.split('|').find(|state| MachineState::parse(state).is_none());
                        problems.extend(odd.map(|state| format!("machines have no state '{state}'")));
                    }
                }
            }
        }
    }
    let known: BTreeSet<&str> =
        FAMILIES.iter().flat_map(|family| family.labels).copied().chain(ADDED).collect();
    for label in grouped(&text) {
        if !known.contains(label) {
            problems.push(format!("no metric has the label {label}"));
        }
    }
    problems
}

/// The labels and values of `{label="value", ..}` at the beginning of a text.
fn matchers(text: &str) -> Vec<(&str, &str)> {
    let Some(mut rest) = text.strip_prefix('{') else { return Vec::new() };
    let mut found = Vec::new();
    while let Some((label, after)) = rest.split_once(['=', '!']) {
        let Some((_, quoted)) = after.split_once('"') else { break };
        let Some((value, after)) = quoted.split_once('"') else { break };
        found.push((label.trim_matches([',', ' ']), value));
        if after.trim_start().starts_with('}') {
            break;
        }
        rest = after;
    }
    found
}

/// The labels of `by (..)`, `on (..)` and the like.
fn grouped(text: &str) -> Vec<&str> {
    let words = ["by (", "on (", "without (", "ignoring (", "group_left (", "group_right ("];
    let lists =
        words.iter().flat_map(|word| text.match_indices(word).map(|(at, _)| &text[at + word.len()..]));
    let labels = lists.filter_map(|rest| rest.split_once(')')).flat_map(|(list, _)| list.split(','));
    labels.map(str::trim).filter(|label| !label.is_empty()).collect()
}

#[test]
fn what_does_not_exist_is_named() {
    assert_eq!(
        unknown(r#"sum by (job) (rate(headwater_writes_total{machine="$machine"}[5m])) > 0"#),
        [""; 0]
    );
    assert_eq!(unknown("headwater_latency_seconds_sum"), [""; 0]);
    assert_eq!(unknown("headwater_writes"), ["there is no metric headwater_writes"]);
    assert_eq!(
        unknown(r#"headwater_reads_total{job="a{b}", served="ram"}"#),
        ["headwater_reads_total has no label served"]
    );
    assert_eq!(unknown(r#"headwater_machines{state=~"lost|gone"}"#), ["machines have no state 'gone'"]);
    assert_eq!(unknown("sum by (instance, host) (headwater_images)"), ["no metric has the label host"]);
}
