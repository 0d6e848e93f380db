//! `--personality` of `machine set` and `catalog set`, and the personality strings in what is shown: names and values that guests read.

use std::collections::BTreeMap;

use headwater_api::SetPersonality;

use crate::cli::PersonalityArgs;
use crate::client::{Client, Owner};
use crate::show;

/// Changes the strings of a machine or a catalog, if the arguments say so. `is_all`: nothing else is changed, so that `--json` prints them.
pub async fn set(
    client: &Client,
    owner: Owner<'_>,
    args: PersonalityArgs,
    is_all: bool,
    json: bool,
) -> anyhow::Result<()> {
    if !args.is_given() {
        return Ok(());
    }
    let request = SetPersonality { set: args.personality.into_iter().collect(), remove: args.no_personality };
    let now = client.set_personality(owner, &request).await?;
    match (json, is_all) {
        (true, true) => show::json(&now),
        (true, false) => Ok(()),
        (false, _) => {
            let name = owner.name();
            show::line(&format!("personality of {name} from the next boot on: {}", in_words(&now.strings)))
        }
    }
}

/// Strings for people.
pub fn in_words(strings: &BTreeMap<String, String>) -> String {
    if strings.is_empty() {
        return "none".to_owned();
    }
    let pairs: Vec<_> = strings.iter().map(|(name, value)| format!("{name}={value}")).collect();
    show::printable(&pairs.join(", "))
}
