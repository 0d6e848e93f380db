//! The flags of `serve` for logins, and the roles of groups.

use clap::Args;
use headwater_api::{Role, Scopes};
use serde_json::Value;

use crate::cli::span;
use crate::failure::invalid;

/// How people log in.
#[derive(Clone, Debug, Default, Args)]
pub struct Settings {
    /// Let people log in with this identity provider, which speaks OpenID Connect, such as
    /// https://login.example.com/realms/lab
    #[arg(long, value_name = "URL", value_parser = issuer, requires_all = ["oidc_client_id", "oidc_role"])]
    pub oidc_issuer: Option<String>,
    /// The client at the identity provider: a public one, without a secret
    #[arg(long, value_name = "ID", value_parser = client_id, requires = "oidc_issuer")]
    pub oidc_client_id: Option<String>,
    /// The scope that a login asks for [default: openid profile email groups, without groups if the identity provider lists its scopes
    /// and groups is not among them]
    #[arg(long, value_name = "SCOPE", value_parser = scope, requires = "oidc_issuer")]
    pub oidc_scope: Option<String>,
    /// The claim of the ID token with the groups of a person [default: groups]
    #[arg(long, value_name = "CLAIM", requires = "oidc_issuer")]
    pub oidc_claim: Option<String>,
    /// The role of a group, such as 'staff=viewer', or with scopes, such as 'teachers=operator catalog:class-*'; a person
    /// gets the highest role of the groups; can be repeated
    #[arg(long, value_name = "GROUP=ROLE", value_parser = RoleRule::parse, requires = "oidc_issuer")]
    pub oidc_role: Vec<RoleRule>,
    /// The duration of a login, 1m to 30d [default: 12h]
    #[arg(long, value_name = "TIME", value_parser = session, requires = "oidc_issuer")]
    pub oidc_session: Option<u64>,
}

impl Settings {
    /// Fails if people could not reach the daemon.
    pub fn check(&self, listens: bool) -> anyhow::Result<()> {
        if self.oidc_issuer.is_some() && !listens {
            return Err(invalid("--oidc-issuer needs --listen or --console, where people log in"));
        }
        Ok(())
    }
}

fn issuer(text: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '\\' | '?' | '#');
    // Plain HTTP is for tests on one host. The request refuses other hosts too.
    let starts = ["https://", "http://127.0.0.1", "http://localhost", "http://[::1]"];
    let is_url = starts.iter().any(|start| text.starts_with(start)) && super::web::is_safe(text);
    if is_url && text.chars().all(is_plain) {
        return Ok(text.to_owned());
    }
    Err("it is not an https URL without a query".to_owned())
}

fn client_id(text: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '\\');
    let is_odd = text.is_empty() || !text.chars().all(is_plain);
    if is_odd {
        Err("a client id is ASCII without spaces and quotes".to_owned())
    } else {
        Ok(text.to_owned())
    }
}

fn scope(text: &str) -> Result<String, String> {
    if text.split(' ').any(|word| word == "openid") {
        return Ok(text.to_owned());
    }
    Err("it does not have the word openid, without which there is no ID token".to_owned())
}

fn session(text: &str) -> Result<u64, String> {
    match span(text)? {
        seconds @ 60..=2_592_000 => Ok(seconds),
        _ => Err("a login lasts for 1m to 30d".to_owned()),
    }
}

/// A group and its role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoleRule {
    group: String,
    role: Role,
    scopes: Option<Scopes>,
}

impl RoleRule {
    /// Parses `GROUP=ROLE`, with scopes after the role. The name of a group may contain `=`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let odd = || format!("'{text}' is not GROUP=ROLE, such as staff=viewer");
        let (group, rest) = text.rsplit_once('=').ok_or_else(odd)?;
        let (role, scopes) = rest.trim().split_once(char::is_whitespace).unwrap_or((rest.trim(), ""));
        if group.is_empty() {
            return Err(odd());
        }
        let role = Role::parse(role)?;
        let scopes = match scopes.trim() {
            "" => None,
            _ if role == Role::Metrics => {
                return Err("the role metrics cannot be limited by scopes".to_owned());
            }
            scopes => Some(Scopes::parse(scopes).map_err(|problem| problem.to_string())?),
        };
        Ok(Self { group: group.to_owned(), role, scopes })
    }
}

/// The role and the scopes of a person: the highest role of the groups, with the scopes of all groups that have this role.
/// `None`: no group has a role.
pub fn role_of(rules: &[RoleRule], groups: &[&str]) -> Option<(Role, Option<Scopes>)> {
    let of_person: Vec<&RoleRule> = rules.iter().filter(|rule| groups.contains(&&*rule.group)).collect();
    let role = of_person.iter().map(|rule| rule.role).max()?;
    let mut all = Scopes::default();
    for rule in of_person.iter().filter(|rule| rule.role == role) {
        // A group without scopes has the role on everything.
        let Some(scopes) = &rule.scopes else { return Some((role, None)) };
        all.catalogs.extend(scopes.catalogs.iter().cloned());
        all.images.extend(scopes.images.iter().cloned());
    }
    for patterns in [&mut all.catalogs, &mut all.images] {
        patterns.sort();
        patterns.dedup();
    }
    Some((role, Some(all)))
}

/// The groups in a claim, which is a text or a list of texts.
pub fn groups(claim: Option<&Value>) -> Vec<&str> {
    match claim {
        Some(Value::String(group)) => vec![group.as_str()],
        Some(Value::Array(groups)) => groups.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_get_the_highest_role_of_their_groups() {
        let rules = [
            "staff=viewer",
            "teachers=operator catalog:class-*",
            "painters=operator image:debian catalog:lab",
            "cn=admins,ou=it=admin",
        ];
        let rules: Vec<_> = rules.iter().map(|rule| RoleRule::parse(rule).unwrap()).collect();
        let of = |groups: &[&str]| {
            role_of(&rules, groups).map(|(role, scopes)| (role.name(), scopes.map(|it| it.to_string())))
        };
        assert_eq!(of(&["staff"]), Some(("viewer", None)));
        assert_eq!(of(&["staff", "teachers"]), Some(("operator", Some("catalog:class-*".to_owned()))));
        let both = of(&["teachers", "painters"]).unwrap();
        assert_eq!(both, ("operator", Some("catalog:class-* catalog:lab image:debian".to_owned())));
        assert_eq!(of(&["teachers", "cn=admins,ou=it"]), Some(("admin", None)));
        assert_eq!((of(&[]), of(&["Staff", "x"])), (None, None));
        for odd in [
            "staff",
            "=viewer",
            "staff=boss",
            "staff=viewer room:1",
            "m=metrics catalog:x",
            "s=viewer catalog:",
        ] {
            assert!(RoleRule::parse(odd).is_err(), "{odd}");
        }
    }

    #[test]
    fn groups_are_a_text_or_a_list() {
        let claims = serde_json::json!({ "one": "staff", "many": ["a", 1, "b"], "none": { "a": 1 } });
        assert_eq!(groups(claims.get("one")), ["staff"]);
        assert_eq!(groups(claims.get("many")), ["a", "b"]);
        assert!(groups(claims.get("none")).is_empty() && groups(claims.get("x")).is_empty());
    }
}
