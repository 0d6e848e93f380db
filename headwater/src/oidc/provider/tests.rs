//! ID tokens that are signed here with the keys of an identity provider. `tests/oidc-login.mjs` has a real one.

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{EncodingKey, encode};
use serde_json::json;

use super::*;

const ISSUER: &str = "https://login.example.com";
const NOW_S: u64 = 1_796_000_000;
const HOUR_S: u64 = 3600;

/// A key of an identity provider.
struct Signer {
    name: &'static str,
    key: EncodingKey,
    jwk: Value,
}

impl Signer {
    fn new(name: &'static str) -> Self {
        let pkcs8 =
            EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &SystemRandom::new()).unwrap();
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, pkcs8.as_ref()).unwrap();
        // The point, uncompressed.
        let point = pair.public_key().as_ref().to_vec();
        let text = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
        let jwk = json!({
            "kty": "EC", "crv": "P-256", "use": "sig", "alg": "ES256", "kid": name,
            "x": text(&point[1..33]), "y": text(&point[33..]),
        });
        Self { name, key: EncodingKey::from_ec_der(pkcs8.as_ref()), jwk }
    }

    /// A token in which these claims differ from a good one.
    fn token(&self, other: &Value) -> String {
        let mut claims = json!({
            "iss": ISSUER, "aud": "headwater", "sub": "4711", "preferred_username": "anna", "nonce": "n",
            "groups": ["staff", "teachers"], "iat": NOW_S - 10, "exp": NOW_S + 300,
        });
        for (claim, value) in other.as_object().unwrap() {
            claims[claim] = value.clone();
        }
        let header = Header { kid: Some(self.name.to_owned()), ..Header::new(Algorithm::ES256) };
        encode(&header, &claims, &self.key).unwrap()
    }
}

/// A provider whose addresses and keys are known.
fn provider(signer: &Signer) -> Provider {
    let rules = ["staff=viewer", "teachers=operator catalog:class-*"];
    let addresses = json!({
        "issuer": ISSUER, "authorization_endpoint": "https://login.example.com/auth?realm=lab",
        "token_endpoint": "https://login.example.com/token", "jwks_uri": "https://login.example.com/keys",
    });
    let metadata = Metadata {
        addresses: serde_json::from_value(addresses).unwrap(),
        keys: serde_json::from_value(json!({ "keys": [signer.jwk] })).unwrap(),
    };
    // Nothing is requested during the test.
    let later = Instant::now() + KEPT;
    let known = Known { metadata: Some((later, metadata)), asked: Some((later, None)) };
    let settings = Settings {
        oidc_issuer: Some(ISSUER.to_owned()),
        oidc_client_id: Some("headwater".to_owned()),
        oidc_role: rules.iter().map(|rule| RoleRule::parse(rule).unwrap()).collect(),
        ..Settings::default()
    };
    Provider { known: Mutex::new(known), ..Provider::of(settings).unwrap() }
}

#[tokio::test]
async fn the_page_of_a_login_has_its_state_nonce_and_challenge() {
    let provider = provider(&Signer::new("one"));
    let attempt = Attempt::of("secret".to_owned());
    let page = provider.page(&attempt, "http://127.0.0.1:1/").await.unwrap();
    assert!(page.starts_with("https://login.example.com/auth?realm=lab&response_type=code&"), "{page}");
    let field = |name: &str| query::field(&page, name).unwrap();
    for (name, expected) in [
        ("client_id", "headwater"),
        ("redirect_uri", "http://127.0.0.1:1/"),
        ("scope", SCOPE),
        ("state", &attempt.state()),
        ("nonce", &attempt.nonce()),
        ("code_challenge", &attempt.challenge()),
        ("code_challenge_method", "S256"),
    ] {
        assert_eq!(field(name), expected, "{name}");
    }
    assert!(!page.contains(&attempt.verifier()) && !page.contains("secret"), "{page}");
}

#[tokio::test]
async fn a_person_has_the_role_of_the_groups() {
    let signer = Signer::new("one");
    let provider = provider(&signer);
    let person = provider.person_of(&signer.token(&json!({})), "n", NOW_S * 1000).await.unwrap();
    assert_eq!((person.name.as_str(), person.role.name()), ("anna (4711)", "operator"));
    assert_eq!(person.scopes.unwrap().to_string(), "catalog:class-*");
    let other = json!({ "preferred_username": null, "groups": "staff", "aud": ["x", "headwater"] });
    let person = provider.person_of(&signer.token(&other), "n", NOW_S * 1000).await.unwrap();
    assert_eq!((person.name.as_str(), person.role.name(), person.scopes), ("4711", "viewer", None));
}

#[tokio::test]
async fn a_key_that_was_replaced_under_its_name_is_found() {
    let (old, new) = (Signer::new("one"), Signer::new("one"));
    let files = tempfile::tempdir().unwrap();
    let server = headwater_testkit::FileServer::start(files.path(), None);
    let url = server.url();
    let addresses = json!({
        "issuer": url, "authorization_endpoint": url, "token_endpoint": url, "jwks_uri": format!("{url}/keys"),
    });
    std::fs::create_dir(files.path().join(".well-known")).unwrap();
    let place = files.path().join(".well-known/openid-configuration");
    std::fs::write(place, addresses.to_string()).unwrap();
    let set_key = |signer: &Signer| {
        std::fs::write(files.path().join("keys"), json!({ "keys": [signer.jwk] }).to_string()).unwrap();
    };
    let provider = Provider { issuer: url.clone(), known: Mutex::default(), ..provider(&old) };
    let claims = json!({ "iss": url });
    let is_known =
        async |signer: &Signer| provider.person_of(&signer.token(&claims), "n", NOW_S * 1000).await.is_ok();
    set_key(&old);
    assert!(is_known(&old).await);
    set_key(&new);
    // It asks at most once a second.
    let requests = server.requests();
    provider.known.lock().await.asked = Some((Instant::now() + PAUSE, None));
    assert!(!is_known(&new).await);
    assert_eq!(server.requests(), requests);
    provider.known.lock().await.asked = None;
    assert!(is_known(&new).await);
    assert!(!is_known(&old).await);
    // A forged token has the keys asked for again, and no more than that.
    provider.known.lock().await.asked = None;
    assert!(!is_known(&Signer::new("one")).await);
    assert!(is_known(&new).await);
}

#[tokio::test]
async fn bad_id_tokens_are_refused_with_the_reason() {
    let signer = Signer::new("one");
    let provider = provider(&signer);
    let refused =
        async |token: &str, now_s: u64| provider.person_of(token, "n", now_s * 1000).await.unwrap_err();
    let usual = signer.token(&json!({}));
    for (other, now_s, why) in [
        (json!({ "aud": "wiki" }), NOW_S, "is for another client than headwater"),
        (json!({ "aud": null }), NOW_S, "no valid claim 'aud'"),
        (json!({ "azp": "wiki" }), NOW_S, "issued to another client"),
        (
            json!({ "iss": "https://evil.example.com" }),
            NOW_S,
            "another issuer than https://login.example.com",
        ),
        (json!({ "exp": "soon" }), NOW_S, "no valid claim 'exp'"),
        (json!({ "nbf": NOW_S + HOUR_S }), NOW_S, "is not valid before"),
        (json!({ "nonce": "m" }), NOW_S, "belongs to another login"),
        (json!({ "nonce": null }), NOW_S, "belongs to another login"),
        (json!({ "groups": ["guests"] }), NOW_S, "anna (4711) has no role here: no group in the claim"),
        (json!({ "groups": null }), NOW_S, "no groups in the claim 'groups'"),
        // The clock of the server is an hour ahead, or an hour behind.
        (json!({}), NOW_S + HOUR_S, "and the server's clock shows"),
        (json!({}), NOW_S - HOUR_S, "and the server's clock shows"),
    ] {
        let problem = refused(&signer.token(&other), now_s).await;
        let text = problem.to_string();
        assert!(text.contains(why), "{other} {now_s}: {text}");
        assert!(problem.advice.is_some() && !text.contains(&usual), "{text}");
    }
    // A minute is no difference.
    assert!(provider.person_of(&usual, "n", (NOW_S + 330) * 1000).await.is_ok());

    // Another key of that name, an unknown key, and no signature.
    let forged = Signer::new("one").token(&json!({}));
    assert!(refused(&forged, NOW_S).await.to_string().contains("the signature of the ID token"));
    let unknown = Signer::new("two").token(&json!({}));
    assert!(refused(&unknown, NOW_S).await.to_string().contains("signed with the key two, and"));
    let body = usual.split('.').nth(1).unwrap();
    for alg in ["none", "HS256"] {
        let header = URL_SAFE_NO_PAD.encode(json!({ "alg": alg, "kid": "one" }).to_string());
        let problem = refused(&format!("{header}.{body}.AAAA"), NOW_S).await;
        assert_eq!(problem.kind, ProblemKind::Unauthorized, "{problem}");
    }
    for odd in ["eyJ", "eyJ.eyJ", "eyJ.eyJ.eyJ", "eyJhbGciOiJFUzI1NiJ9..", &usual[..usual.len() - 9]] {
        assert_eq!(refused(odd, NOW_S).await.kind, ProblemKind::Unauthorized, "{odd}");
    }
}
