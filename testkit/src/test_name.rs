//! Names of tests, for tests that run once more in a process of their own.

use std::any::type_name;

/// The name of a test in its program, for `--exact`, including its module. The argument is the test function
/// itself, so a renamed test is still found.
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
        // With only one thread, tests run on the first one.
        assert!(
            name.is_none_or(|name| name == "main" || name == test_name(a_test_is_named_as_its_program_does))
        );
    }
}
