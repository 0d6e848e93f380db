//! Tokens of logins. `headwater/tests/oidc-login.mjs` has logins with a real identity provider.

use headwater_api::{Role, Scopes};

use super::*;
use crate::lifecycle::tests::Fixture;
use crate::server::named;

const SESSION_S: u64 = 3600;

fn anna() -> Person {
    let scopes = Scopes { catalogs: vec!["class-*".to_owned()], images: Vec::new() };
    Person { name: "anna (4711)".to_owned(), role: Role::Operator, scopes: Some(scopes) }
}

#[tokio::test]
async fn a_login_has_the_role_and_scopes_of_the_person_until_it_ends() {
    let fixture = Fixture::new().await;
    fixture.pass_ms(0);
    let service = &fixture.service;
    let token = service.log_in(anna(), SESSION_S).await.unwrap();
    assert_eq!((token.info.role, &token.info.scopes), (Role::Operator, &anna().scopes));
    assert_eq!(token.info.created_by, "oidc anna (4711)");
    assert!(token.info.name.starts_with("anna--4711-"), "{}", token.info.name);
    assert!(named(service, &token.secret).await.is_ok());
    fixture.pass_ms(SESSION_S * 1000 - 1);
    assert!(named(service, &token.secret).await.is_ok());
    fixture.pass_ms(1);
    let problem = named(service, &token.secret).await.unwrap_err();
    assert_eq!(problem.kind, ProblemKind::Unauthorized);
    assert!(problem.message.contains("expired"), "{problem}");
}

#[tokio::test]
async fn a_login_ends_at_will_and_another_token_does_not() {
    let fixture = Fixture::new().await;
    let service = &fixture.service;
    let (first, second) =
        (service.log_in(anna(), SESSION_S).await.unwrap(), service.log_in(anna(), SESSION_S).await.unwrap());
    let other = TokenRecord {
        name: "nightly".to_owned(),
        hash: token::hash_of("hwt_other"),
        role: Role::Viewer,
        scopes: None,
        created_by: format!("token {}", first.info.name),
        created_at_ms: 1,
        expires_at_ms: None,
    };
    let mut repo = service.db().write().await.unwrap();
    repo.tokens().add(&other).await.unwrap();
    repo.save().await.unwrap();
    for secret in [&*first.secret, "hwt_other", "hwt_unknown", &*first.secret] {
        service.log_out(secret).await.unwrap();
    }
    assert!(named(service, &first.secret).await.is_err());
    assert!(named(service, &second.secret).await.is_ok() && named(service, "hwt_other").await.is_ok());
}

#[tokio::test]
async fn logins_that_have_ended_and_the_oldest_of_too_many_are_removed() {
    let fixture = Fixture::new().await;
    fixture.pass_ms(0);
    let service = &fixture.service;
    let ben = Person { name: "ben".to_owned(), ..anna() };
    let of_ben = service.log_in(ben, SESSION_S * 2).await.unwrap();
    let mut of_anna = Vec::new();
    for _ in 0..=LOGINS_MAX {
        of_anna.push(service.log_in(anna(), SESSION_S).await.unwrap());
        fixture.pass_ms(1);
    }
    assert!(named(service, &of_anna[0].secret).await.is_err());
    for kept in of_anna.iter().skip(1).chain([&of_ben]) {
        assert!(named(service, &kept.secret).await.is_ok(), "{}", kept.info.name);
    }
    fixture.pass_ms(SESSION_S * 1000);
    let last = service.log_in(anna(), SESSION_S).await.unwrap();
    let left = service.db().read().await.unwrap().tokens().list().await.unwrap();
    let names: Vec<_> = left.iter().map(|token| &token.name).collect();
    assert_eq!(names, [&last.info.name, &of_ben.info.name]);
}

#[test]
fn tokens_of_logins_have_names_of_tokens() {
    for (person, expected) in [
        ("Anna@Example.com (4711)", "anna-example-com--4711"),
        ("--", "person"),
        ("\u{e9}", "person"),
        (&"x".repeat(100), &"x".repeat(54)),
    ] {
        assert_eq!(stem(person), expected);
        headwater_api::name::check_label("token", &format!("{}-00000000", stem(person))).unwrap();
    }
}
