//! The dashboards: each query is one that Prometheus can parse, about metrics that exist, and panels do not overlap.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::expressions::unknown;

/// Each dashboard, by its file's name.
fn dashboards() -> BTreeMap<String, Value> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/grafana");
    let files = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let read = |path: std::path::PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let text = std::fs::read_to_string(&path).unwrap();
        let board = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{name}: {e}"));
        (name, board)
    };
    files.map(read).collect()
}

fn panels(board: &Value) -> &[Value] {
    board["panels"].as_array().map_or(&[], Vec::as_slice)
}

/// All expressions of a dashboard, with the panel that has each.
fn expressions(board: &Value) -> Vec<(&str, &str)> {
    let mut found = Vec::new();
    for panel in panels(board) {
        let queries = panel["targets"].as_array().map_or(0, Vec::len);
        assert!(panel["type"] == "row" || queries > 0, "{}: it has no query", panel["title"]);
        for target in panel["targets"].as_array().into_iter().flatten() {
            found.push((panel["title"].as_str().unwrap(), target["expr"].as_str().unwrap()));
        }
    }
    found
}

#[test]
fn prometheus_can_parse_each_query() {
    let mut rules = Vec::new();
    for (file, board) in &dashboards() {
        for (panel, expression) in expressions(board) {
            // What Grafana puts in.
            let expression = expression.replace("$__rate_interval", "5m").replace("$__range", "3h");
            assert!(!expression.contains("$__"), "{file}: {panel}: {expression}");
            rules.push(json!({"record": format!("query:{}", rules.len()), "expr": expression}));
        }
    }
    let mut promtool = Command::new("promtool")
        .args(["check", "rules", "/dev/stdin"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool (Debian package prometheus) runs");
    let count = rules.len();
    let document = json!({"groups": [{"name": "queries", "rules": rules}]}).to_string();
    promtool.stdin.take().unwrap().write_all(document.as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    let said =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(said.contains(&format!("{count} rules found")), "{said}");
}

#[test]
fn the_dashboards_use_metrics_that_exist() {
    for (file, board) in &dashboards() {
        for (panel, expression) in expressions(board) {
            assert_eq!(unknown(expression), [""; 0], "{file}: {panel}");
        }
        for variable in board["templating"]["list"].as_array().unwrap() {
            if let Some(query) = variable["definition"].as_str() {
                assert_eq!(unknown(query), [""; 0], "{file}: {}", variable["name"]);
                let label = query.rsplit([' ', ')']).find(|word| !word.is_empty()).unwrap();
                assert_eq!(unknown(&format!("sum by ({label}) (1)")), [""; 0], "{file}: {query}");
            }
        }
    }
}

#[test]
fn the_panels_of_a_dashboard_have_texts_and_places_of_their_own() {
    let boards = dashboards();
    let names: Vec<&str> = boards.keys().map(String::as_str).collect();
    assert_eq!(names, ["headwater-fleet.json", "headwater-host.json", "headwater-machine.json"]);
    for (file, board) in &boards {
        assert_eq!(format!("{}.json", board["uid"].as_str().unwrap()), *file);
        let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
        for panel in panels(board) {
            let title = panel["title"].as_str().unwrap();
            assert!(ids.insert(panel["id"].as_u64().unwrap()), "{file}: {title}: its id is used twice");
            if panel["type"] != "row" {
                assert!(panel["description"].as_str().is_some_and(|text| text.len() > 5), "{file}: {title}");
                // The data source is chosen in the dashboard, so that it loads into any Grafana.
                assert_eq!(panel["datasource"]["uid"], "${datasource}", "{file}: {title}");
            }
            let place = |key: &str| panel["gridPos"][key].as_u64().unwrap();
            assert!(place("x") + place("w") <= 24, "{file}: {title}: wider than the dashboard");
            for x in place("x")..place("x") + place("w") {
                for y in place("y")..place("y") + place("h") {
                    assert!(cells.insert((x, y)), "{file}: {title}: it overlaps another panel");
                }
            }
        }
    }
}
