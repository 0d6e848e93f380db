//! `docs/openapi.json` is what the code says.

mod typescript;

use std::path::Path;

/// A checked-in file is `expected`; with `HEADWATER_BLESS` it is written.
fn is_up_to_date(file: &str, expected: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(file);
    if std::env::var_os("HEADWATER_BLESS").is_some() {
        std::fs::write(&path, expected).expect("the file can be written");
    }
    let checked_in = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        checked_in == expected,
        "{file} is out of date: HEADWATER_BLESS=1 cargo test -p headwater-service --test openapi writes it again"
    );
}

#[test]
fn the_checked_in_description_is_up_to_date() {
    let described = headwater_service::operations::openapi().to_pretty_json().expect("it is JSON") + "\n";
    is_up_to_date("docs/openapi.json", &described);
}

#[test]
fn the_types_of_the_web_console_are_those_of_the_description() {
    let described = serde_json::to_value(headwater_service::operations::openapi()).expect("it is JSON");
    is_up_to_date("console/src/generated.ts", &typescript::types(&described));
}

#[test]
fn every_schema_that_is_named_is_described() {
    fn names(value: &serde_json::Value, found: &mut Vec<String>) {
        match value {
            serde_json::Value::Object(object) => {
                let named = object.get("$ref").and_then(|name| name.as_str());
                found.extend(named.map(str::to_owned));
                object.values().for_each(|inner| names(inner, found));
            }
            serde_json::Value::Array(array) => array.iter().for_each(|inner| names(inner, found)),
            _ => {}
        }
    }
    let described = serde_json::to_value(headwater_service::operations::openapi()).expect("it is JSON");
    let mut found = Vec::new();
    names(&described, &mut found);
    assert!(found.len() > 100, "{} references", found.len());
    for name in found {
        assert!(described.pointer(name.trim_start_matches('#')).is_some(), "{name}");
    }
}

#[test]
fn parameters_are_where_clients_put_them() {
    let described = serde_json::to_value(headwater_service::operations::openapi()).expect("it is JSON");
    let mut seen = 0;
    for (path, methods) in described["paths"].as_object().expect("paths") {
        for parameter in methods
            .as_object()
            .expect("methods")
            .values()
            .flat_map(|it| it["parameters"].as_array().cloned().unwrap_or_default())
        {
            let name = parameter["name"].as_str().expect("a name");
            let place = if path.contains(&format!("{{{name}}}")) { "path" } else { "query" };
            assert_eq!(parameter["in"], place, "{name} of {path}");
            seen += 1;
        }
    }
    assert!(seen > 30, "{seen} parameters");
}

#[test]
fn every_operation_tells_how_it_is_refused() {
    let described = serde_json::to_value(headwater_service::operations::openapi()).expect("it is JSON");
    for (path, methods) in described["paths"].as_object().expect("paths") {
        for (method, operation) in methods.as_object().expect("methods") {
            for status in ["400", "401", "403", "500"] {
                let content = &operation["responses"][status]["content"]["application/problem+json"];
                let schema = &content["schema"]["$ref"];
                assert_eq!(schema, "#/components/schemas/ProblemDetails", "{status} of {method} {path}");
            }
        }
    }
}

#[test]
fn every_operation_says_which_role_it_needs() {
    let described = serde_json::to_value(headwater_service::operations::openapi()).expect("it is JSON");
    let mut of_role = std::collections::BTreeMap::<String, Vec<String>>::new();
    for (path, methods) in described["paths"].as_object().expect("paths") {
        for (method, operation) in methods.as_object().expect("methods") {
            let role = operation["security"][0]["token"][0].as_str();
            let role = role.unwrap_or_else(|| panic!("{method} {path} says nothing of a role"));
            of_role.entry(role.to_owned()).or_default().push(format!("{method} {path}"));
        }
    }
    // Each change of the first two sets is a decision about what a program or a person who only looks may see.
    assert_eq!(of_role["metrics"], ["get /api/v1/caller", "get /metrics"]);
    assert!(
        of_role["viewer"].iter().all(|operation| operation.starts_with("get ")),
        "{:?}",
        of_role["viewer"]
    );
    let roles: Vec<_> = of_role.keys().map(String::as_str).collect();
    assert_eq!(roles, ["admin", "metrics", "operator", "viewer"]);
}

#[test]
fn what_a_change_of_a_machine_may_come_to_is_told() {
    let described = serde_json::to_value(headwater_service::operations::openapi()).expect("it is JSON");
    // As docs/api.md says: off or on and not noted, and a persistent disk whose files are gone.
    for (verb, statuses) in
        [("stop", &["404", "507"][..]), ("start", &["409", "422", "507"]), ("reset", &["409", "422", "507"])]
    {
        let responses =
            &described["paths"][format!("/api/v1/machines/{{machine}}/{verb}")]["post"]["responses"];
        for status in statuses {
            assert!(responses[status].is_object(), "{status} of {verb}");
        }
    }
}
