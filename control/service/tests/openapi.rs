//! `docs/openapi.json` is what the code says.

use std::path::Path;

#[test]
fn the_checked_in_description_is_up_to_date() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
    let described = headwater_service::operations::openapi().to_pretty_json().expect("it is JSON") + "\n";
    if std::env::var_os("HEADWATER_BLESS").is_some() {
        std::fs::write(&path, &described).expect("docs can be written");
    }
    let checked_in = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        checked_in == described,
        "docs/openapi.json is out of date; write it anew with HEADWATER_BLESS=1 cargo test -p headwater-service --test openapi"
    );
}
