//! The schemas of the description as types of TypeScript, for `console/src/generated.ts`.
//!
//! A property that is not required is left out of an answer and is never null, so `null` is not part of these types.

use std::fmt::Write as _;

use serde_json::Value;

/// All schemas, by name.
pub fn types(described: &Value) -> String {
    let mut out = "// The types of the API. Generated from docs/openapi.json; do not change this file by hand:\n// HEADWATER_BLESS=1 cargo test -p headwater-service --test openapi writes it again.\n".to_owned();
    for (name, schema) in described["components"]["schemas"].as_object().expect("schemas") {
        comment(&mut out, schema, "");
        if is_interface(schema) {
            let _ = writeln!(out, "export interface {name} {}", object(schema, ""));
        } else {
            let _ = writeln!(out, "export type {name} = {};", type_of(schema, ""));
        }
    }
    out
}

fn is_interface(schema: &Value) -> bool {
    schema["properties"].is_object() && schema["oneOf"].is_null() && schema["allOf"].is_null()
}

/// The first paragraph of a description, as a comment.
fn comment(out: &mut String, schema: &Value, indent: &str) {
    if indent.is_empty() {
        out.push('\n');
    }
    let text = schema["description"].as_str().unwrap_or_default();
    let first = text.split("\n\n").next().unwrap_or_default().replace('\n', " ");
    if !first.is_empty() {
        let _ = writeln!(out, "{indent}/** {} */", first.replace("*/", "* /"));
    }
}

fn object(schema: &Value, indent: &str) -> String {
    let mut out = "{\n".to_owned();
    let inner = format!("{indent}  ");
    let required = schema["required"].as_array();
    for (name, property) in schema["properties"].as_object().expect("properties") {
        comment(&mut out, property, &inner);
        let is_required = required.is_some_and(|required| required.iter().any(|it| it == name));
        let mark = if is_required { "" } else { "?" };
        let _ = writeln!(out, "{inner}{name}{mark}: {};", type_of(property, &inner));
    }
    out + indent + "}"
}

fn type_of(schema: &Value, indent: &str) -> String {
    if let Some(reference) = schema["$ref"].as_str() {
        return reference.rsplit('/').next().expect("a name").to_owned();
    }
    for (key, between) in [("oneOf", " | "), ("allOf", " & ")] {
        if let Some(parts) = schema[key].as_array() {
            let parts = parts.iter().map(|part| type_of(part, indent)).filter(|part| part != "null");
            return parts.collect::<Vec<_>>().join(between);
        }
    }
    if let Some(values) = schema["enum"].as_array() {
        return values.iter().map(Value::to_string).collect::<Vec<_>>().join(" | ");
    }
    let kinds = match &schema["type"] {
        Value::Array(kinds) => {
            kinds.iter().filter_map(Value::as_str).filter(|kind| *kind != "null").collect()
        }
        kind => vec![kind.as_str().unwrap_or_else(|| panic!("{schema} has no type"))],
    };
    let [kind] = kinds[..] else { panic!("{schema} has several types") };
    match kind {
        "integer" | "number" => "number".to_owned(),
        "string" | "boolean" | "null" => kind.to_owned(),
        "array" => {
            let item = type_of(&schema["items"], indent);
            if item.contains(' ') { format!("({item})[]") } else { format!("{item}[]") }
        }
        "object" if schema["properties"].is_object() => object(schema, indent),
        "object" if schema["additionalProperties"].is_null() => "Record<string, unknown>".to_owned(),
        "object" => format!("Record<string, {}>", type_of(&schema["additionalProperties"], indent)),
        other => panic!("the type {other} is not known here"),
    }
}
