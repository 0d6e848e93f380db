//! Names of tests, for those that run once more in a process of its own.

use std::any::type_name;

/// The name by which its program knows a test, for `--exact`: with its module, where it has one. It is given as what it is, a function, so
/// that one that is renamed is still found.
pub fn test_name<T: FnOnce()>(_: T) -> &'static str {
    let path = type_name::<T>();
    path.split_once("::").map_or(path, |(_crate, name)| name)
}

#[cfg(test)]
mod tests {
    use super::test_name;

    #[test]
    fn a_test_is_named_as_its_program_does() {
        assert_eq!(
            test_name(a_test_is_named_as_its_program_does),
            "test_name::tests::a_test_is_named_as_its_program_does"
        );
        let name = std::thread::current().name().map(str::to_owned);
        // With one thread only, tests run on the first one.
        assert!(
            name.is_none_or(|name| name == "main" || name == test_name(a_test_is_named_as_its_program_does))
        );
    }
}
